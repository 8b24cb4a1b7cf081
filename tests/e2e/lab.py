"""A rollout engine with everything needed to check it: its mirror, random updates, and transformers as the judge."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache

from anabranch.kernels.delta_codec import TensorChange
from anabranch.producers.engine import Finished, RolloutEngine, SwapReport
from anabranch.producers.mirror import Mirror, tensor_bits
from anabranch.schemas.versions import PolicyVersion

TEMPERATURE = 0.7
Changed = dict[str, NDArray[np.int64] | None]


@dataclass
class Lab:
    """`refused_before_first_policy`: what `submit` said before any swap. Tests share a lab: each starts with `begin`."""

    model_dir: Path
    engine: RolloutEngine
    mirror: Mirror
    refused_before_first_policy: str
    states: dict[PolicyVersion, NDArray[np.uint8]] = field(default_factory=dict)
    two_ends: bool = False  # its generation config names a second end-of-sequence token
    _versions: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _rng: np.random.Generator = field(default_factory=np.random.default_rng)

    def begin(self, seed: int) -> SwapReport:
        """Start a test: the checkpoint's own weights under a new version, and updates drawn from `seed` from here on, so
        that a test sees the same weights whatever ran before it."""
        self._rng = np.random.default_rng(seed)
        original = Mirror.from_checkpoint(self.model_dir)
        names = list(self.mirror.layout.by_name)
        self.mirror.apply(TensorChange(n, None, original.tensor_bits(n)) for n in names)
        return self._swap(dict.fromkeys(names))

    def publish(self, *, fraction: float = 0.02, dense: bool = False) -> SwapReport:
        """Swap in the next version, with about `fraction` of every tensor's elements changed to others of its values."""
        changed = self.change(fraction=fraction)
        return self._swap({name: None if dense else indices for name, indices in changed.items()})

    def change(self, *, fraction: float) -> Changed:
        """Only change the mirror; returns where."""
        changes = []
        for spec in self.mirror.layout.tensors:
            where = np.flatnonzero(self._rng.random(spec.numel) < fraction).astype(np.int64)
            bits = self.mirror.tensor_bits(spec.name)
            changes.append(TensorChange(spec.name, where, self._rng.permutation(bits)[: len(where)].copy()))
        self.mirror.apply(changes)
        return {c.name: c.indices for c in changes}

    def _swap(self, changed: Changed) -> SwapReport:
        policy = PolicyVersion(1, next(self._versions))
        self.states[policy] = self.mirror.image.copy()  # for the judge
        return self.engine.swap(self.mirror, policy, changed)

    def submit(self, prompts: Sequence[Sequence[int]], *, max_tokens: int, prefix: str = "r") -> list[str]:
        names = [f"{prefix}{i}" for i in range(len(prompts))]
        for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            self.engine.submit(name, prompt, seed=i, max_tokens=max_tokens)
        return names

    def run(self, steps: int = 10_000) -> dict[str, Finished]:
        """Up to `steps` engine steps; what finished in them, by request id."""
        done: dict[str, Finished] = {}
        for _ in range(steps):
            if not self.engine.has_unfinished:
                break
            done |= {f.request_id: f for f in self.engine.step()}
        return done

    def judge(self, prompt: Sequence[int], finished: Finished, *, keep_kv: bool = False) -> NDArray[np.float64]:
        """|recorded − recomputed| log-prob of each token, [T], in fp32 by transformers under the tagged versions.

        With `keep_kv`, a span's forward pass runs on the keys and values that the earlier versions left in the cache;
        without it, over a fresh cache for every version.
        """
        tokens, prompt_len = [*prompt, *finished.token_ids.tolist()], len(prompt)
        starts = [s.start for s in finished.spans]
        recomputed, cache, seen = [], DynamicCache(), 0
        for span, start, end in zip(finished.spans, starts, [*starts[1:], len(finished.token_ids)], strict=True):
            if not keep_kv:
                cache, seen = DynamicCache(), 0
            last = prompt_len + end - 1  # the last token of the span is drawn from the position before it
            with torch.no_grad():
                inputs = torch.tensor([tokens[seen:last]])
                logits = self._model(span.policy)(inputs, past_key_values=cache, use_cache=True).logits[0]
            wanted = torch.tensor(tokens[prompt_len + start : prompt_len + end])
            logprobs = torch.log_softmax(logits[-(end - start) :] / TEMPERATURE, dim=-1)
            recomputed.append(logprobs.gather(1, wanted[:, None])[:, 0])
            seen = last
        return np.abs(torch.cat(recomputed).numpy() - finished.logprobs).astype(np.float64)

    def _model(self, policy: PolicyVersion) -> torch.nn.Module:
        model = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32)
        image = self.states[policy]
        state = {
            spec.name: torch.from_numpy(tensor_bits(image, spec)).view(torch.bfloat16).view(spec.shape).float()
            for spec in self.mirror.layout.tensors
        }
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}, missing
        return model.eval()


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Random byte prompts, [count][length]."""
    return np.random.default_rng(seed).integers(0, 256, (count, length)).tolist()
