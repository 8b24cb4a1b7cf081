"""The rollout engine: vLLM in this process, stepped by this thread, with weights that change between two steps.

Invariant: the tag is true. A token's `VersionSpan` names the policy whose weights sampled it, and its log-prob is that
of the distribution it was drawn from: the weights change only inside `swap`, between two steps, and the version moves
only after the last element is written. Held by tests/e2e/test_engine_tags.py; that the weights are the published ones
by tests/e2e/test_engine_digest.py.

KV at a swap (`producer.kv_policy`):
    keep        running requests go on with the KV of older weights (PipelineRL style). Tokens after the swap are sampled
                from what the engine computes on that mixed cache: a fresh forward pass gives slightly other log-probs.
    recompute   running requests are preempted and their KV is computed anew from prompt and tokens so far. Tokens
                already sampled keep their tag and log-prob, they are not sampled again.
    new_requests_only
                no request sees two policies: `swap` refuses while one runs. Its caller starts none, steps until
                `has_unfinished` is false, then swaps.
Whichever it is, the prefix cache never crosses a swap: it is salted with the policy, and requests that have no token yet
are started afresh under the new one.

What a swap costs: `prepare` works out all writes in the background, beside the steps; `swap` of the same update then only
writes the elements that changed. Without `prepare`, `swap` does both.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.producers.mirror import Mirror, layout_of_checkpoint
from anabranch.producers.vllm_setup import build_engine, configure_environment, stop_token_ids
from anabranch.producers.worker_updates import Changed, WorkerUpdates
from anabranch.schemas.config import ProducerSection, SamplingSection
from anabranch.schemas.errors import AnabranchError, ConfigError, UnsafeSamplingError
from anabranch.schemas.layout import Layout
from anabranch.schemas.versions import PolicyVersion, VersionSpan


class EngineState(Enum):
    LOADED = "loaded"  # serves nothing: no policy confirmed yet
    SERVING = "serving"
    BROKEN = "broken"  # a swap failed while writing: the weights are of no version
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Finished:
    """A completed request. `token_ids` int32 [T] (end-of-sequence included), `logprobs` float32 [T] (processed, at the
    sampling temperature), `finish_reason` "stop" or "length", `text` without the token that ended it and without special tokens.
    With any other reason ("abort", "error") vLLM gave the request up; the rest is empty then."""

    request_id: str
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    finish_reason: str
    text: str

    @property
    def complete(self) -> bool:
        return self.finish_reason in ("stop", "length")


@dataclass(frozen=True, slots=True)
class SwapReport:
    """`pause_s`: how long no step could run. `elements`: checkpoint elements written, `tensors`: in how many tensors."""

    policy: PolicyVersion
    pause_s: float
    elements: int
    tensors: int


@dataclass(slots=True)
class _Request:
    prompt: list[int]
    params: Any
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class RolloutEngine:
    """Owns one vLLM engine. Not thread-safe: one thread submits, steps and swaps."""

    def __init__(self, model_dir: Path, config: ProducerSection, sampling: SamplingSection, *, seed: int) -> None:
        """Load the checkpoint in `model_dir` and resolve its index map.

        Raises:
            ConfigError: no vLLM, another device than configured, or a vLLM this shim does not know.
            ModelMismatchError: the checkpoint does not fit the model, or live weights differ from it after loading.
            UnsafeSamplingError: the model's own defaults would still change sampling.
        """
        configure_environment(config)
        self._config, self._sampling = config, sampling
        self._layout = layout_of_checkpoint(model_dir)
        self._stop_token_ids = stop_token_ids(model_dir)
        self._requests: dict[str, _Request] = {}
        self._policy: PolicyVersion | None = None
        self._engine = build_engine(model_dir, config, seed)
        self._updates = WorkerUpdates(self._engine.collective_rpc, self._layout)
        self._tokenizer = self._engine.get_tokenizer()
        self._state = EngineState.LOADED
        try:
            defaults = self._engine.model_config.get_diff_sampling_param()
            if defaults:
                raise UnsafeSamplingError(f"the model's generation config changes sampling: {defaults}")
            self._updates.ask("anabranch_init", model_dir=str(model_dir))
        except BaseException:
            self.close()
            raise

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def layout(self) -> Layout:
        """Layout of the checkpoint it was built from: the only one `swap` accepts."""
        return self._layout

    @property
    def policy(self) -> PolicyVersion | None:
        """The policy that the engine confirms to serve; None before the first swap."""
        return self._policy if self._state is EngineState.SERVING else None

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        seed: int,
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> None:
        """Queue one rollout. Same prompt, seed and weights in the same schedule give the same tokens.

        Args:
            prompt_token_ids: int [P], P ≥ 1.
            seed: of this request's sampling.
            max_tokens, temperature: default to the sampling configuration; temperature 0 is greedy (for evaluation).

        Raises:
            AnabranchError: no policy is served yet, or the id is in use.
            ConfigError: prompt and completion do not fit `producer.max_model_len`.
        """
        self._require_serving()
        if request_id in self._requests:
            raise AnabranchError(f"request {request_id!r} is already running")
        prompt = [int(t) for t in prompt_token_ids]
        limit = self._sampling.max_tokens if max_tokens is None else max_tokens
        if not prompt or limit < 1 or len(prompt) + limit > self._config.max_model_len:
            raise ConfigError(
                f"request {request_id!r}: a prompt of {len(prompt)} and up to {limit} new tokens do not fit "
                f"producer.max_model_len = {self._config.max_model_len}"
            )
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=self._sampling.temperature if temperature is None else temperature,
            max_tokens=limit,
            seed=seed,
            logprobs=0,  # that of the sampled token alone
            flat_logprobs=True,
            detokenize=False,  # once, at the end; token by token it costs a quarter of the step
            stop_token_ids=self._stop_token_ids,
            output_kind=RequestOutputKind.DELTA,
        )
        request = self._requests[request_id] = _Request(prompt, params)
        try:
            self._start(request_id, request)
        except BaseException:
            del self._requests[request_id]
            raise

    def step(self) -> list[Finished]:
        """One engine step: at most one token for each running request. Returns the requests that it finished."""
        self._require_serving()
        finished = []
        for output in self._engine.step():
            request = self._requests[output.request_id]
            completion = output.outputs[0]
            request.token_ids += completion.token_ids
            request.logprobs += completion.logprobs.logprobs if completion.logprobs is not None else []
            if output.finished:
                del self._requests[output.request_id]
                finished.append(self._finish(output.request_id, request, completion))
        return finished

    def abort(self, request_ids: Iterable[str]) -> dict[str, int]:
        """Forget these requests; unknown ids are ignored. Returns how many tokens each of them had."""
        known = {r: len(self._requests.pop(r).token_ids) for r in request_ids if r in self._requests}
        if known:
            self._engine.abort_request(list(known))
        return known

    def prepare(self, mirror: Mirror, policy: PolicyVersion, changed: Changed) -> bool:
        """Begin to work out the writes of `swap` with the same arguments, beside the steps. Ask again between steps.

        `mirror` and `changed` must hold still until that swap, or until another update is prepared or swapped in.

        Returns:
            Whether all is worked out, so that `swap` has only to write.

        Raises:
            As `swap`, for what it refuses.
        """
        self._require(EngineState.LOADED, EngineState.SERVING)
        self._updates.begin(mirror, policy, changed)
        return self._updates.staged(wait=False)

    def swap(self, mirror: Mirror, policy: PolicyVersion, changed: Changed) -> SwapReport:
        """Serve the state in `mirror` as `policy` from the next step on.

        Args:
            changed: what differs from the state of the previous swap: tensor name -> flat indices int64 [K], or None
                for the whole tensor. The first swap writes every tensor, whatever it says.

        Raises:
            ModelMismatchError: the mirror has another layout, or a name is unknown; the old weights go on serving.
            DeltaError: an index is out of range; the old weights go on serving.
            AnabranchError: requests run and kv_policy is new_requests_only (the old weights go on serving), or writing
                failed; the engine is broken then (`state`) and must be closed.
        """
        self._require(EngineState.LOADED, EngineState.SERVING)
        started = time.perf_counter()
        if self._config.kv_policy == "new_requests_only" and self._requests:
            raise AnabranchError(
                f"producer.kv_policy = new_requests_only: {len(self._requests)} requests run under {self._policy}; "
                f"finish them before the swap to {policy}"
            )
        update = self._updates.begin(mirror, policy, changed)
        self._updates.staged(wait=True)
        try:
            self._updates.write()
            self._forget_kv()
            self._engine.set_weight_version(str(policy))
            self._policy = PolicyVersion.parse(self._engine.get_weight_version())
        except Exception as error:
            self._state = EngineState.BROKEN
            raise AnabranchError(f"the swap to {policy} failed while writing; the engine is broken: {error}") from error
        self._state = EngineState.SERVING
        self._restart_waiting()
        pause_s = time.perf_counter() - started
        return SwapReport(policy, pause_s, update.elements, update.tensors)

    def live_digest(self) -> str:
        """Root digest of the weights the engine computes with, mapped back to checkpoint names, order and dtype.

        Raises:
            ModelMismatchError: the live values are not exact in the checkpoint's dtype, or there is no way back.
        """
        self._require(EngineState.LOADED, EngineState.SERVING)
        live = Mirror(self._layout)
        try:
            self._updates.ask("anabranch_export_live", path=live.path, layout_hash=self._layout.hash)
            return live.digest()
        finally:
            live.close()

    def close(self) -> None:
        """Stop the engine and its workers. Idempotent."""
        if self._state is EngineState.CLOSED:
            return
        self._state = EngineState.CLOSED
        self._requests.clear()
        self._engine.engine_core.shutdown()
        del self._engine
        self._updates.close()

    def _require(self, *states: EngineState) -> None:
        if self._state not in states:
            raise AnabranchError(f"the engine is {self._state.value}")

    def _require_serving(self) -> None:
        if self._state is EngineState.LOADED:
            raise AnabranchError("no policy is served yet: swap first")
        self._require(EngineState.SERVING)

    def _start(self, request_id: str, request: _Request) -> None:
        from vllm.inputs.engine import tokens_input

        prompt = tokens_input(request.prompt, cache_salt=str(self._policy))
        self._engine.add_request(request_id, prompt, request.params.clone())

    def _finish(self, request_id: str, request: _Request, completion: Any) -> Finished:
        if completion.finish_reason not in ("stop", "length"):
            nothing = np.empty(0)
            return Finished(
                request_id, nothing.astype(np.int32), nothing.astype(np.float32), (), str(completion.finish_reason), ""
            )
        spans = completion.weight_versions or []
        tokens = len(request.token_ids)
        ends = [s.start for s in spans[1:]] + [tokens]
        if not spans or spans[0].start != 0 or [s.end for s in spans] != ends or len(request.logprobs) != tokens:
            raise AnabranchError(f"request {request_id!r}: {tokens} tokens, {len(request.logprobs)} log-probs, {spans}")
        stopped = completion.finish_reason == "stop"
        return Finished(
            request_id=request_id,
            token_ids=np.array(request.token_ids, dtype=np.int32),
            logprobs=np.array(request.logprobs, dtype=np.float32),
            spans=tuple(VersionSpan(PolicyVersion.parse(s.version), s.start) for s in spans),
            finish_reason=str(completion.finish_reason),
            text=self._tokenizer.decode(request.token_ids[: tokens - stopped], skip_special_tokens=True),
        )

    def _forget_kv(self) -> None:
        """No KV of older weights for new requests; for running ones by policy."""
        if self._config.kv_policy == "recompute" or not self._requests:
            self._engine.reset_prefix_cache(reset_running_requests=True)

    def _restart_waiting(self) -> None:
        """Requests without a token yet would find prompt KV under the old salt: start them under the new one."""
        waiting = {i: r for i, r in self._requests.items() if not r.token_ids}
        if waiting and self._config.kv_policy == "keep":
            self._engine.abort_request(list(waiting))
            for request_id, request in waiting.items():
                self._start(request_id, request)
