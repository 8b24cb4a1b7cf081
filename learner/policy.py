"""The model as the learner sees it: token ids in, log-probs of chosen tokens out.

Invariant: `PolicyModule` returns what log_softmax(logits / temperature) of the whole model returns, without ever
holding all logits; `check_head` refuses a model whose head does more than a linear map. `MasterWeights` computes
with the rounded weights that producers serve, while the parameters (and their gradients) stay float32. Held by
tests/unit/learner/test_policy.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.kernels.logprobs import chosen_logprobs
from anabranch.learner.packed_attention import PlanRows
from anabranch.schemas.errors import ConfigError, ModelMismatchError


def load_model(model_dir: Path, dtype: torch.dtype) -> Any:
    """The causal language model in `model_dir`, on the CPU, without dropout; weights of −0.0 become 0.0.

    Raises:
        ConfigError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"model.path = {model_dir} is not a Hugging Face checkpoint folder: config.json is missing")
    try:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path = {model_dir} cannot be loaded: {error}") from error
    model.config.use_cache = False
    with torch.no_grad():
        for parameter in model.parameters():
            # Adam turns −0.0 into 0.0 even at lr = 0 (−0.0 + 0·m), which would show as a change of bits.
            parameter.add_(0.0)
    # Dropout would make the log-probs of equal weights differ: importance ratios must be 1 at lag 0.
    return model.eval()


class HeadLogprobs(nn.Module):
    """The output head and the log-softmax as one module, so that ZeRO-3 gathers the head's weight once around it."""

    def __init__(self, head: nn.Linear, temperature: float) -> None:
        super().__init__()
        self._head = (head,)  # in a tuple: the head belongs to the language model, not to us
        self.temperature = temperature

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        head = self._head[0]
        return chosen_logprobs(hidden, head.weight, head.bias, targets, temperature=self.temperature)

    def external_parameters(self) -> list[nn.Parameter]:
        """What ZeRO-3 has to gather around `forward` although it belongs to another module."""
        return list(self._head[0].parameters(recurse=False))


class PolicyModule(nn.Module):
    """A Hugging Face causal language model `lm`, asked for log-probs only."""

    def __init__(self, lm: Any, temperature: float) -> None:
        super().__init__()
        head = lm.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ConfigError(f"{type(lm).__name__} has no linear output head; the learner cannot train it")
        if lm.base_model is lm:
            raise ConfigError(f"{type(lm).__name__} does not name its part below the head; the learner cannot train it")
        self.lm = lm
        self._longest = _longest_exact(lm.config.get_text_config())
        self.head_logprobs = HeadLogprobs(head, temperature)
        self.plan_rows: PlanRows | None = None  # set by `use_packed_attention`

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, segments: Tensor, predecessors: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-prob of `targets[i]` as the token after flat position `predecessors[i]`; see `MicroBatch` for the arguments.

        Args:
            input_ids, position_ids: int64 [B, L], padded on the right.
            segments: int64 [S, 3]; none: every row is one.
            predecessors, targets: int64 [N].

        Returns:
            float32 [N] log-probs with gradient, float32 [N] entropies.

        Raises:
            ModelMismatchError: a sequence is so long that its log-probs would depend on what else is in the microbatch.
        """
        if self._longest is not None and int(position_ids.max()) >= self._longest:
            raise ModelMismatchError(
                f"a sequence has {int(position_ids.max()) + 1} positions or more: beyond {self._longest} {type(self.lm).__name__} "
                "encodes positions by the longest sequence of a microbatch (its rope_type), so log-probs would not be "
                "those of the sequence by itself; sample shorter ones"
            )
        packed = {}
        if len(segments):
            if self.plan_rows is None:
                raise ConfigError(f"{type(self.lm).__name__} was not made ready for packed rows (use_packed_attention)")
            packed["packed_row"] = self.plan_rows(segments.cpu().numpy(), input_ids.shape[1], input_ids.device)
        # Right padding under causal attention needs no mask: no real token sees what comes after it.
        hidden = self.lm.base_model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **packed
        ).last_hidden_state
        return self.head_logprobs(states_at(hidden.flatten(0, 1), predecessors), targets)  # type: ignore[no-any-return]


def states_at(states: Tensor, places: Tensor) -> Tensor:
    """`states` [L, H] at `places` (int64 [N]), among which the end of a shared prompt is once for each completion. Its
    gradient is their sum, added in a fixed order: each device has one way only that does so."""
    return states[places] if states.is_cuda else states.index_select(0, places)


def _longest_exact(config: Any) -> int | None:
    """Positions up to which a token's place is encoded by its position alone; None: however many."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
    limits = [
        int(kind.get("original_max_position_embeddings") or config.max_position_embeddings)
        if kind.get("rope_type") == "longrope"
        else int(config.max_position_embeddings)
        for kind in kinds
        if kind.get("rope_type") in ("longrope", "dynamic")
    ]
    return min(limits, default=None)


class _Rounded(torch.autograd.Function):
    """A float32 master as the weight that is served: rounded to `stored`, computed with in `compute`. The gradient
    goes straight to the master, accumulated in float32."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, stored: torch.dtype, compute: torch.dtype) -> Tensor:
        return master.to(stored).to(compute)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].float(), None, None


class MasterWeights(nn.Module):
    """A `PolicyModule` whose parameters are float32 masters; each forward pass rounds them to the stored dtype."""

    def __init__(self, policy: PolicyModule, stored: torch.dtype, compute: torch.dtype) -> None:
        super().__init__()
        self.policy = policy.float()
        self.stored, self.compute = stored, compute

    def forward(self, *inputs: Tensor) -> Any:
        rounded = {
            name: _Rounded.apply(p, self.stored, self.compute)  # type: ignore[no-untyped-call]
            for name, p in self.policy.named_parameters()
        }
        return torch.func.functional_call(self.policy, rounded, inputs, tie_weights=True)


@torch.no_grad()
def check_head(policy: PolicyModule) -> None:
    """Compare a few log-probs with those of the model's own logits, and see that nothing stands between the two.

    Raises:
        ModelMismatchError: they differ (soft-capped or scaled logits, for example).
    """
    lm, head = policy.lm, policy.lm.get_output_embeddings()
    vocab = head.weight.shape[0]
    ids = torch.arange(12).reshape(1, 12) * 7 % vocab
    rows = torch.empty((0, 3), dtype=torch.int64)
    ours, _ = policy(ids, torch.arange(12)[None], rows, torch.arange(11), ids[0, 1:])
    logits = lm(input_ids=ids, use_cache=False).logits[0, :-1]
    log_p = torch.log_softmax(logits.float() / policy.head_logprobs.temperature, dim=-1)
    theirs = log_p.gather(1, ids[0, 1:, None]).squeeze(1)
    worst = float((ours - theirs).abs().max())
    if not worst < 1e-2 or not _passes_on(lm, head, ids):
        raise ModelMismatchError(
            f"{type(lm).__name__}: its head does more than a linear map, which the learner does not support: soft-capped or "
            f"scaled logits, for example (log-probs from its hidden states differ by {worst:.3g} from its own)"
        )


def _passes_on(lm: Any, head: nn.Linear, ids: Tensor) -> bool:
    """Whether the model's logits are what its head gives, also where that is 64 times as much: small logits do not show a
    cap that larger ones, later in training, meet."""
    given: list[Tensor] = []

    def amplify(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        given.append(64 * output)
        return given[-1]

    hook = head.register_forward_hook(amplify)
    try:
        logits = lm(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    return not given or torch.equal(logits.to(given[0].dtype), given[0])
