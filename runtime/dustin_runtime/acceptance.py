"""Which drafts a step emits and what the target adds: greedy, by lossless rejection sampling, or at a set rate.

Everything but `rate_for` is a function of device tensors with shapes fixed by its arguments' shapes, and reads nothing
on the host: a CUDA graph can hold it. Logits of lower precision are taken to fp32, fp64 stays fp64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dustin_runtime.errors import UsageError

DRAFT, ACCEPT, FINAL = 0, 1, 2
"""Streams of `uniform`: the draft's proposal, the acceptance test, the target's own token."""
STREAMS = 3

_MANTISSA = 24


def _signed(constant: int) -> int:
    """The int64 with the bits of an unsigned constant."""
    return constant - (1 << 64)


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


@dataclass(frozen=True)
class Sampling:
    """How each row of a batch samples; buffers keep their place, so that a captured graph sees what is written.

    Attributes:
        temperature: [batch] fp32, not negative; 0 is greedy.
        top_p: [batch] fp32 in (0, 1]; 1 is off.
        seed: [batch] int64. Rows of one seed draw the same numbers at the same positions.
    """

    temperature: Tensor
    top_p: Tensor
    seed: Tensor

    @classmethod
    def allocate(cls, batch: int, device: torch.device | str) -> Sampling:
        """Rows that are all greedy."""
        return cls(
            torch.zeros(batch, device=device),
            torch.ones(batch, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
        )

    def write(self, row: int, temperature: float, top_p: float, seed: int) -> None:
        """Fill one row in place."""
        self.temperature[row] = temperature
        self.top_p[row] = top_p
        self.seed[row] = seed


def uniform(seed: Tensor, position: Tensor, stream: int | Tensor) -> Tensor:
    """Random numbers that depend on the arguments' values alone, not on batch, order or device.

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014): `seed` and `stream`
    choose a sequence, `position` is the index in it.

    Args:
        seed: int64.
        position: int64, the absolute position of the token that is decided.
        stream: a small int that tells apart the uses at one position.

    Returns:
        fp32 in [0, 1), multiples of 2^-24, of the shape that the arguments broadcast to.
    """
    sequence = _mix(seed * _GAMMA + stream)
    bits = _mix(sequence + (position + 1) * _GAMMA)
    return _shift(bits, 64 - _MANTISSA).float() * 2.0**-_MANTISSA


def probabilities(logits: Tensor, temperature: Tensor, top_p: Tensor, *, nucleus: bool) -> Tensor:
    """What each row samples from.

    Args:
        logits: [B, T, V].
        temperature: [B] fp32. 0 puts all on the arg-max, the smaller id of equals.
        top_p: [B] fp32 in (0, 1]: the most probable ids are kept until their mass reaches it, the smaller id of equals
            first (Holtzman et al., arXiv 1904.09751).
        nucleus: False passes `top_p` and the sort it needs by, for batches that have it off in every row.

    Returns:
        [B, T, V] fp32 (fp64 of fp64 logits), each row of sum 1.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    temperature = temperature.to(logits.dtype)[:, None, None]
    top_p = top_p.to(logits.dtype)[:, None, None]
    # The largest becomes 0 before the division, which may then overflow to -inf only: no temperature makes a NaN.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.clamp_min(torch.finfo(logits.dtype).tiny)
    best = logits.argmax(dim=-1, keepdim=True)
    one_hot = (torch.arange(logits.shape[-1], device=logits.device) == best).to(logits.dtype)
    found = torch.where(temperature > 0, scaled.softmax(dim=-1), one_hot)
    return torch.where(top_p < 1, _nucleus(found, top_p), found) if nucleus else found


def draw(probabilities: Tensor, u: Tensor) -> Tensor:
    """The id at which the cumulative mass passes the share `u` of the total; never one without mass.

    Args:
        probabilities: [..., V], not negative; the sum need not be 1.
        u: [...] in [0, 1).

    Returns:
        [...] int64.
    """
    mass = probabilities.cumsum(dim=-1)
    # A parallel sum may step down by a rounding, so that the first that passes has no mass, or none passes. The first
    # is masked here; for the second the most probable is taken, by the same arg-max.
    passed = (mass > u.to(mass.dtype).unsqueeze(-1) * mass[..., -1:]) & (probabilities > 0)
    return probabilities.masked_fill(passed, torch.inf).argmax(dim=-1)


def accept_greedy(best: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the drafts that are the target's arg-max.

    Args:
        best: [B, depth + 1] int64, the target's arg-max at each position.
        drafts: [B, depth] int64.

    Returns:
        tokens: [B, depth + 1] int64: the accepted drafts, then the target's own token; valid ids of no meaning after.
        accepted: [B] int64 in [0, depth].
    """
    return best, leading(best[:, :-1] == drafts)


def accept_sampled(
    target_probabilities: Tensor, draft_probabilities: Tensor, drafts: Tensor, u_accept: Tensor, u_final: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept drafts so that the emitted tokens are distributed as the target's, whatever the draft's distribution.

    Leviathan et al., arXiv 2211.17192, Algorithm 1; Chen et al., arXiv 2302.01318, Algorithm 2.

    Args:
        target_probabilities: [B, depth + 1, V], p.
        draft_probabilities: [B, depth, V], the q that the drafts were drawn from.
        drafts: [B, depth] int64; depth 0 is plain sampling.
        u_accept: [B, depth] in [0, 1).
        u_final: [B] in [0, 1), for the target's own token.

    Returns:
        tokens, accepted: as of `accept_greedy`, and equal to its where p and q are one-hot.
    """
    depth = drafts.shape[1]
    ids = drafts.unsqueeze(-1)
    p = target_probabilities[:, :depth].gather(2, ids).squeeze(-1)
    q = draft_probabilities.gather(2, ids).squeeze(-1)
    accepted = leading(u_accept * q < p)  # u < p / q
    rest = _at(target_probabilities, accepted)
    if depth:
        residual = (rest - _at(draft_probabilities, accepted.clamp_max(depth - 1))).clamp_min(0)
        # Equal p and q but for roundings can reject and leave nothing; p is then as good.
        usable = (accepted < depth).unsqueeze(1) & (residual.amax(dim=1, keepdim=True) > 0)
        rest = torch.where(usable, residual, rest)
    return _joined(drafts, draw(rest, u_final).unsqueeze(1), accepted), accepted


def accept_forced(drafts: Tensor, own: Tensor, passes: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the drafts that it was decided to accept, whatever the models say: for timing only.

    Args:
        drafts: [B, depth] int64.
        own: [B, depth + 1] int64, the target's token at each position.
        passes: [B, depth] bool, see `forced_passes`.

    Returns:
        tokens, accepted: as of `accept_greedy`.
    """
    accepted = leading(passes)
    return _joined(drafts, own, accepted), accepted


def forced_passes(rows: int, positions: int, rate: float, device: torch.device | str) -> Tensor:
    """Whether a draft at a position is accepted, decided beforehand: a step is then as cheap as a greedy one.

    Every row accepts at random, but at every position the share of rows that do is `rate` to within one row (stratified
    sampling), so that short runs come close to the rate as well.

    Returns:
        [rows, positions] bool.
    """
    u = uniform(torch.arange(rows + 1, device=device).unsqueeze(1), torch.arange(positions, device=device), ACCEPT)
    ranks = u[1:].argsort(dim=0).argsort(dim=0)
    return ranks + u[0] < rate * rows


def leading(passed: Tensor) -> Tensor:
    """[B] int64, how many columns of [B, depth] bool are true before the first that is not."""
    return passed.long().cumprod(dim=1).sum(dim=1)


def rate_for(tau: float, depth: int) -> float:
    """The acceptance rate at which steps of `depth` drafts emit `tau` tokens on average: 1 + r + ... + r^depth = tau.

    Raises:
        UsageError: no rate in [0, 1] does.
    """
    if not 1 <= tau <= depth + 1:
        raise UsageError(
            f"--force-acceptance {tau:g}: a step of {depth} drafts emits 1 to {depth + 1} tokens; "
            f"give 1 to depth+1 = {depth + 1}"
        )
    if tau == 1:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**power for power in range(depth + 1)) < tau:
            low = middle
        else:
            high = middle
    return high


def _mix(state: Tensor) -> Tensor:
    """SplitMix64's output function, a bijection of int64; products wrap around."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        state = (state ^ _shift(state, shift)) * multiplier
    return state ^ _shift(state, 31)


def _shift(bits: Tensor, count: int) -> Tensor:
    """Logical right shift: torch's repeats the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _nucleus(found: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the smallest set of ids whose mass reaches `top_p`, and scale to sum 1."""
    ordered, ids = found.sort(dim=-1, descending=True, stable=True)
    before = torch.nn.functional.pad(ordered.cumsum(dim=-1)[..., :-1], (1, 0), value=-1.0)  # the first always stays
    kept = torch.zeros_like(found).scatter(-1, ids, ordered.masked_fill(before >= top_p, 0))
    return kept / kept.sum(dim=-1, keepdim=True)


def _at(rows: Tensor, index: Tensor) -> Tensor:
    """[B, V]: of [B, T, V] the row `index` [B]."""
    return rows.gather(1, index[:, None, None].expand(-1, 1, rows.shape[2])).squeeze(1)


def _joined(drafts: Tensor, own: Tensor, accepted: Tensor) -> Tensor:
    """[B, depth + 1]: drafts up to `accepted`, then `own` ([B, depth + 1] or [B, 1])."""
    padded = torch.nn.functional.pad(drafts, (0, 1))
    return torch.where(torch.arange(padded.shape[1], device=drafts.device) < accepted.unsqueeze(1), padded, own)
