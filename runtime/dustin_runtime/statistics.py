"""The figures of one run that judge a method."""

from __future__ import annotations

from dataclasses import dataclass, field

from dustin_runtime.audit import Audit, summary


@dataclass
class Statistics:
    """Figures of one run; a step counts once per active row."""

    setup_seconds: float = 0.0
    """Reserving buffers, compiling kernels, capturing the step."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    """All the rest: steps, and what the host does between them."""
    steps: int = 0
    launches: int = 0
    """Steps of the whole batch."""
    emitted: int = 0
    """Tokens emitted by steps: the first token of a sequence comes from its prefill."""
    accepted_at: list[int] = field(default_factory=list)
    """How often the draft at position 1, 2, ... of its step was accepted."""
    read: float = 0.0
    """Prefix tokens that a KV head read, summed over steps."""
    full: int | None = None
    """Steps that a guard verified in full; None where there is none."""
    audits: list[Audit] = field(default_factory=list)
    """What audited steps found, one entry per row."""
    interrupted: bool = False
    """Whether the run was broken off; sequences that had ended are complete."""

    @property
    def tau(self) -> float:
        """Tokens per step, the target's own included; what a limit cut off the last step counts."""
        return 1 + sum(self.accepted_at) / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.emitted / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def acceptance(self) -> list[float]:
        """Share of steps that accepted the draft at each position; a rejection ends a step's run."""
        return [count / self.steps for count in self.accepted_at] if self.steps else []

    @property
    def kept(self) -> float:
        """Mean prefix tokens that a KV head reads per step."""
        return self.read / self.steps if self.steps else 0.0

    @property
    def full_share(self) -> float | None:
        """Share of steps that a guard verified in full."""
        return None if self.full is None or not self.steps else self.full / self.steps

    def as_dict(self) -> dict[str, object]:
        """The figures for a report."""
        return {
            "tokens": self.emitted,
            "steps": self.steps,
            "tokens_per_s": self.tokens_per_second,
            "tau": self.tau,
            "acceptance_per_position": self.acceptance,
            "kept_tokens_per_step": self.kept,
            **({} if self.full_share is None else {"full_steps_share": self.full_share}),
            **({"divergence": found._asdict()} if (found := summary(self.audits)) else {}),
            "setup_s": self.setup_seconds,
            "prefill_s": self.prefill_seconds,
            "decode_s": self.decode_seconds,
        }
