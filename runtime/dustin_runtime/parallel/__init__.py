"""One target over several processes (tensor parallelism), by torch.distributed.

`ranks` starts and checks the processes of a run; `shards` says what of each weight one of them holds, by shape alone;
`collectives` is how they talk in a step; `tensor` puts the last two together for a decoder; `rows` splits the drafting.
"""
