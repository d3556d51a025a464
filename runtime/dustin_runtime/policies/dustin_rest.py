"""Dustin with one token more for each query head, which stands in for all that its list leaves unread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dustin_runtime.attention.rest import RestTokens, update_rest
from dustin_runtime.attention.scoring import received_mass, rows_bytes
from dustin_runtime.attention.sparse import SparseAttention
from dustin_runtime.config import MOST_REST_QUERIES, Rest, Selection
from dustin_runtime.guard import Rule
from dustin_runtime.kernels import next_power_of_2
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.parallel.split import Part
from dustin_runtime.policies.base import Prompted, Signals
from dustin_runtime.policies.dustin import Dustin
from dustin_runtime.scaled import Held, shown
from dustin_runtime.selection import eligible_positions, select


def rest_of(selection: Selection) -> Rest:
    """How the tokens are made; the defaults where a configuration does not say."""
    return selection.rest or Rest()


def most_turns(whole: ModelShape, here: ModelShape, rest: Rest) -> int:
    """Of the layers of a whole model that are here, those that may have their turn in one step."""
    return min(here.layers, -(-whole.layers // rest.period))


class RestMemory:
    """The tokens of every layer, and what they are made of; implements `policies.base.Memory`.

    In `Rest.period` steps every layer has its turn once: its last accepted queries attend to what the step before did
    not read. A row's turns depend on nothing but its own steps, so that its text does not depend on the others'; a
    layer's on its number in the whole model, so that it does not depend on how that is split over ranks either. Each of
    these has the tokens of its own heads and layers.

    Attributes:
        tokens: [layers, rows, ...].
        queries: [layers, rows, slots, query_heads, head_size]. A position's query lies in slot `position % slots`, and
            there are as many more slots than `Rest.queries` as a step has drafts: a rejected draft's query lies behind
            the prefix, where it is not read, until the token that takes its position overwrites it, and no draft's slot
            is that of a query which the next step reads.
        there: [rows] fp32, of how many query heads there is a token, summed over the layers here.
        listed: [rows, budget] int64, what the last step read, -1 padded.
        steps: [rows] int64, by which turns are counted. A prompt begins it at its mark, so that turns of different
            prompts do not fall on the same steps: a step that reads a layer of all rows takes a sixth longer.

    Args:
        first: tokens that a prompt's tokens take as read: the least that a step may read.
    """

    def __init__(self, selection: Selection, first: int, target: Decoder, depth: int, rows: int) -> None:
        self.selection, self.first, self.target = selection, first, target
        rest, shape, dtype, device = rest_of(selection), target.shape, target.dtype, target.device
        self.period, self.weight = rest.period, rest.weight
        heads = (shape.layers, rows, shape.query_heads)
        keys, values = (torch.zeros(*heads, shape.head_size, dtype=dtype, device=device) for _ in range(2))
        self.tokens = RestTokens(keys, values, torch.full(heads, float("-inf"), dtype=torch.float32, device=device))
        size = (shape.layers, rows, rest.queries + depth, shape.query_heads, shape.head_size)
        self.queries = torch.zeros(size, dtype=dtype, device=device)
        self.there = torch.zeros(rows, dtype=torch.float32, device=device)
        self.listed = torch.full((rows, selection.budget), -1, dtype=torch.int64, device=device)
        self.steps = torch.arange(rows, device=device) * rest.period // rows
        self._row = torch.arange(rows, device=device).unsqueeze(1)
        self._last = torch.arange(-rest.queries, 0, device=device)
        self._turn = torch.arange(most_turns(target.whole, shape, rest), device=device).unsqueeze(1)

    def admit(self, row: int, target: Prompted, draft: Prompted | None) -> None:
        """Make every layer's token from a prompt's end, as if it had read what its last queries attend to most: all of
        them together, those of other ranks too."""
        one, length = slice(row, row + 1), target.length
        slots, lengths = self.queries.shape[2], self.steps.new_full((1,), length)
        mass = torch.zeros(1, length, dtype=torch.float32, device=lengths.device)
        for layer, q in target.queries.items():
            last = q[:, -min(len(self._last), length) :]
            positions = torch.arange(length - last.shape[1], length, device=q.device)
            self.queries[layer, row, positions % slots] = last[0]
            mass += received_mass(last, target.keys(layer)).sum(dim=(1, 2))
        mass = self.target.summed(mass)
        chosen = self.selection
        settings = {"budget": self.first, "m": 0, "sink": chosen.sink, "window": chosen.window}
        self.listed[one] = -1
        self.listed[one, : self.first] = select(None, mass, lengths, **settings)
        made = RestTokens(*(part[:, one].contiguous() for part in self.tokens))
        keys, values = (shown(held, length) for held in (target.cache.all_keys, target.cache.all_values))
        unread = self._unread(lengths, length, one)
        for layer in target.queries:  # one by one, or their sums would be as large as the keys
            self._make(made, lengths.new_full((1, 1), layer), lengths, keys, values, unread, one, None)
        for part, new in zip(self.tokens, made, strict=True):
            part[:, one] = new
        self.steps[row] = target.mark % self.period

    def refresh(self, lengths: Tensor, keys: Held, values: Held, share: float | None) -> None:
        """Make the tokens of those anew whose turn it is.

        Args:
            lengths: [rows] int64; keys, values: [layers, rows, columns, kv_heads, head_size].
            share: of the GPU's processors that are used, see `update_rest`.
        """
        every = slice(None)
        unread = self._unread(lengths, keys.shape[2], every)
        self._make(self.tokens, self._whose_turn(), lengths, keys, values, unread, every, share)
        self.there.copy_(self.tokens.bias.isfinite().sum(dim=(0, 2)))
        self.steps.add_(1)

    def read(self) -> Tensor:
        """[rows] fp32, tokens of the rest that a KV head reads: mean over all heads and layers, other ranks' too."""
        return self.target.summed(self.there / (self.target.whole.layers * self.target.whole.kv_heads))

    def _whose_turn(self) -> Tensor:
        """[turns, rows] int64: of the layers here, counted from the first, those whose turn it is; -1 for none."""
        layers = len(self.queries)
        first, behind = (self._turns_before(at) for at in (self.steps, self.steps + 1))
        turn = first + self._turn
        return torch.where(turn < behind, turn % layers, -1)

    def _turns_before(self, steps: Tensor) -> Tensor:
        """[rows] int64: of the turns that were over before a step, in all of the model, those of the layers here."""
        layers, here = self.target.whole.layers, self.target.layers
        turns = steps * layers // self.period
        return turns // layers * len(here) + (turns % layers - here.start).clamp(0, len(here))

    def _unread(self, lengths: Tensor, columns: int, rows: slice) -> Tensor:
        """[rows, columns] bool: what some rows' last lists left out of their prefixes."""
        chosen, listed = self.selection, self.listed[rows]
        unread = eligible_positions(lengths, columns, sink=chosen.sink, window=chosen.window)
        # One column more, for what pads a list, and for positions of a longer sequence that has ended.
        at = torch.where((listed < 0) | (listed > columns), columns, listed)
        return torch.nn.functional.pad(unread, (0, 1)).scatter_(1, at, False)[:, :columns].contiguous()

    def _make(
        self,
        out: RestTokens,
        layer: Tensor,
        lengths: Tensor,
        keys: Held,
        values: Held,
        unread: Tensor,
        rows: slice,
        share: float | None,
    ) -> None:
        """Make the tokens of some layers [turns, rows] of each of some rows."""
        # A prefix shorter than that many queries asks its first token several times.
        position = (lengths.unsqueeze(1) + self._last).clamp(min=0)
        q = self.queries[layer.clamp(min=0).unsqueeze(2), self._row[rows], position % self.queries.shape[2]]
        update_rest(out, q, keys, values, layer, position, unread, self.weight, share)


@dataclass(frozen=True)
class DustinRest(Dustin):
    """Dustin's list, and for each query head of every layer a token that stands in for what the list leaves out.

    It stands for what the list of the layer's last turn left out: until the next one, what has been listed since counts
    twice, and what has left the window since not at all.

    A list at a 32nd of the prefix leaves a third of the attention unread; softmax over the list alone gives that third
    to the listed tokens. Here it goes where the layer's own last queries had it, see `attention.rest`. Making a layer's
    token reads its whole cache, but in a step only `layers / Rest.period` layers do, beside the drafting.
    """

    name: ClassVar[str] = "dustin-rest"
    works_beside: ClassVar[bool] = True
    prompt_queries: ClassVar[int] = MOST_REST_QUERIES

    def memory(self, target: Decoder, depth: int, rows: int, capacity: int) -> RestMemory:
        assert self.selection is not None
        first = self.rule.sizes[0] if self.rule and self.rule.sizes else self.selection.budget
        return RestMemory(self.selection, first, target, depth, rows)

    def memory_bytes(
        self, target: Part, draft: ModelShape | None, depth: int, rows: int, capacity: int, element_bytes: int
    ) -> int:
        assert self.selection is not None
        rest, shape = rest_of(self.selection), target.shape
        width = shape.query_heads * shape.head_size * element_bytes
        tokens = shape.layers * (rows + 1) * (2 * width + 4 * shape.query_heads)
        queries = shape.layers * (rows * (rest.queries + depth) + MOST_REST_QUERIES) * width
        turns = rows * most_turns(target.whole, shape, rest)
        tile = max(16, next_power_of_2(shape.group * rest.queries))
        # Parts of sums over 2048 keys; in plain torch rows of scores, and keys and values of the layer once more.
        pieces = turns * shape.kv_heads * -(-capacity // 2048)
        sums = 4 * pieces * tile * 2 * (shape.head_size + 1) + turns * rest.queries * width
        rows_of = rows_bytes(shape, rest.queries, capacity) * (turns if element_bytes > 2 else 0)
        known = super().memory_bytes(target, draft, depth, rows, capacity, element_bytes)
        return known + tokens + queries + sums + rows_of + rows * (8 * self.selection.budget + 4 * capacity)

    def begin(self, signals: Signals, share: float | None) -> None:
        memory = self._memory(signals)
        memory.refresh(signals.lengths, signals.prefix_keys(), signals.prefix_values(), share)

    def _attention(
        self, signals: Signals, kept: Tensor, full: Tensor | None = None, estimate: Tensor | None = None
    ) -> SparseAttention:
        memory = self._memory(signals)
        memory.listed.copy_(kept[0, :, 0])
        return SparseAttention(
            kept,
            full=full,
            estimate=estimate,
            rest=memory.tokens,
            rest_read=memory.read(),
            saved=memory.queries,
        )

    def _due(self, signals: Signals, rule: Rule) -> Tensor:
        return rule.due(self._memory(signals).steps - 1)  # `begin` has counted this one

    def _memory(self, signals: Signals) -> RestMemory:
        assert isinstance(signals.memory, RestMemory)
        return signals.memory


@dataclass(frozen=True)
class DustinRestLook(DustinRest):
    """Both: the draft looks from its last token too (`DustinLook`), and the rest has a token."""

    name: ClassVar[str] = "dustin-rest-look"
    last_look: ClassVar[bool] = True
