"""Several processes of one run, by torch.distributed; above all one target over them (tensor parallelism).

`ranks` starts and checks the processes; `shards` says what of each weight one of them holds, by shape alone;
`collectives` is how they talk in a step, `reduce` ways to sum what ends a block, of which `sums` takes the fastest;
`watch` ends a wait for the GPU that a dead rank leaves without end; `tensor` puts shares and talk together for a
decoder; `rows` splits the drafting.
Where layers are not split but dealt out, `stages` and `pipeline` stand for `shards` and `tensor`; `split` is what both
answer.
"""
