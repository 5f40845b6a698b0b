"""One first-order rule, and the three ways to run it: chunk by chunk, token by token, and one token in place."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mdn.ops.backends import requested_backend, resolve, with_states
from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.containment import contain_damage
from mdn.ops.context_parallel import RangeOutput, TokenTensors, check_tokens, over_ranges, refuse_plan, requested_plan
from mdn.ops.first_order import inputs
from mdn.ops.first_order.chunk_scalar import chunk_scalar_decay, native_scalar_decay, native_step
from mdn.ops.first_order.chunk_vector import chunk_vector_decay
from mdn.ops.first_order.gates import RawGates, log_decay_from, writing_strength
from mdn.ops.first_order.inputs import FirstOrderOutput, FirstOrderTensors, PreparedTensors
from mdn.ops.first_order.native_vector import native_vector_decay, native_vector_step_
from mdn.ops.first_order.reference import recurrent_form, step_
from mdn.ops.momentum.interface import RuleOptions, compute_dtype
from mdn.ops.momentum.step import prepared_once
from mdn.ops.shared_checks import (
    PLAIN_TYPES,
    check_initial_state,
    check_scale,
    check_state_indices,
    refuse_gradients,
    refuse_transforms,
    without_autocast,
)

if TYPE_CHECKING:
    from mdn.parallel import ContextParallelPlan

Computed = tuple[Tensor, ...]
"""outputs [B, T, HV, V], or an empty tensor if they are not needed, and final states [N, HV, K, V]"""
StepFunction = Callable[[FirstOrderTensors, Tensor, Tensor | None], Tensor]
"""of the tensors of one token, the state that changes in place, and the slots"""


class SharedArguments(NamedTuple):
    """What the public functions take beside the tensors of their rule, under FLA's names."""

    scale: float | None
    initial_state: Any
    output_final_state: bool
    cu_seqlens: Tensor | SequenceBoundaries | None
    use_qk_l2norm_in_kernel: bool = False
    state_v_first: bool = False
    normalize: bool = False
    """linear attention only"""
    context_parallel: ContextParallelPlan | None = None
    check_gates: bool = True
    """False: the values of the gates are not looked at; ``chunk_*`` only"""
    outputs: bool = True
    """False: only the final state is needed, as inside context parallelism; o may be left out, as an empty tensor"""


STEP_FIELDS = (*FirstOrderTensors._fields, "state")
"""what a step is given, in the order in which it looks at them"""
HINTS = ("cu_seqlens_cpu", "chunk_indices", "safe_gate", "disable_recompute")
"""arguments of FLA's functions that change how its kernels compute, not what"""
REFUSED = {
    "cp_context": "it belongs to FLA's context parallelism; give context_parallel=ContextParallelPlan",
    "return_intermediate_states": "states inside a sequence are not returned; call the rule on its pieces",
    "use_graph": "it belongs to FLA's Ascend kernels",
    "max_num_seqs": "it belongs to FLA's Ascend kernels",
}


@dataclass(frozen=True)
class Rule:
    """Which parts of the general rule (inputs.py) a rule has, and how FLA's function of the same name is called."""

    name: str
    arguments: Mapping[str, str]
    """the rule's fields of ``FirstOrderTensors``, with the names they have in its public functions and in FLA's"""
    optional: tuple[str, ...] = ()
    """fields that may be None"""
    vector: bool = False
    """the decay is one number per key dimension"""
    erases: bool = True
    """the error is taken against what the state holds along p"""
    p_times_alpha: bool = False
    """... at the decayed state"""
    fla_options: tuple[str, ...] = ()
    """fields of ``SharedArguments`` that FLA's function also takes"""
    fla_shares_keys: bool = False
    """FLA's kernels know value heads that share a key head"""
    hints: tuple[str, ...] = HINTS

    def chunk(
        self,
        tensors: FirstOrderTensors,
        shared: SharedArguments,
        chunk_size: int,
        backend: str,
        hints: Mapping[str, Any],
    ) -> FirstOrderOutput:
        """The chunkwise form, on the backend that was requested or is best."""
        self.check_hints(hints)
        inputs.check_chunk_size(chunk_size)
        scale = self.check(tensors, shared.scale)
        plan = requested_plan(shared.context_parallel, shared.cu_seqlens)
        if plan is not None:
            return self._chunk_over_ranges(plan, tensors, shared, chunk_size, backend, hints)
        refuse_transforms(f"chunk_{self.name}", f"recurrent_{self.name}", (*tensors, shared.initial_state))
        if shared.check_gates:
            inputs.check_gate_values(tensors, self.arguments)
        chosen = self.backend_for(tensors, backend, shared.initial_state)
        if chosen == "fla":
            return self._call_fla(tensors, shared, hints)
        initial, boundaries = self._initial_state(tensors, shared)
        if chosen == "cpu" and not self.vector:  # the kernel contains damage by itself
            normalise = shared.use_qk_l2norm_in_kernel
            options = RuleOptions(scale, chunk_size, normalise, self.p_times_alpha, outputs=shared.outputs)
            computed = native_scalar_decay(tensors, initial, boundaries, options, self.erases)
            return _finish(computed, tensors.v, shared)

        def compute(given: FirstOrderTensors) -> Computed:
            prepared = self._prepare(given, scale, shared.use_qk_l2norm_in_kernel)
            if chosen == "cpu":
                return native_vector_decay(prepared, initial, boundaries, shared.outputs)
            if self.vector:
                return chunk_vector_decay(prepared, initial, boundaries, chunk_size, shared.outputs)
            return chunk_scalar_decay(prepared, initial, boundaries, chunk_size, shared.outputs)

        return _finish(contain_damage(compute, tensors, boundaries), tensors.v, shared)

    def _chunk_over_ranges(
        self,
        plan: ContextParallelPlan,
        tensors: FirstOrderTensors,
        shared: SharedArguments,
        chunk_size: int,
        backend: str,
        hints: Mapping[str, Any],
    ) -> FirstOrderOutput:
        """The same for this rank's tokens; states are those of all documents, on every rank."""
        check_tokens(self.arguments["q"], tensors.q, plan)
        plain = shared._replace(context_parallel=None, initial_state=None, output_final_state=True, state_v_first=False)
        count = plan.documents.num_sequences
        initial = None if shared.initial_state is None else self._states(count, tensors, shared)

        def rule(
            part: TokenTensors, state: Tensor | None, boundaries: SequenceBoundaries, outputs: bool
        ) -> RangeOutput:
            call = plain._replace(initial_state=state, cu_seqlens=boundaries, outputs=outputs)
            o, final = self.chunk(FirstOrderTensors(**part), call, chunk_size, backend, hints)  # type: ignore[arg-type]
            assert final is not None
            return RangeOutput(o, final)

        o, final = over_ranges(rule, tensors._asdict(), tensors.q.shape[3], plan, initial, shared.output_final_state)
        if final is not None and shared.state_v_first:
            final = final.transpose(-1, -2)
        return FirstOrderOutput(o, final)

    def recurrent(self, tensors: FirstOrderTensors, shared: SharedArguments) -> FirstOrderOutput:
        """The definition."""
        refuse_plan(f"recurrent_{self.name}", f"use chunk_{self.name}")
        scale = self.check(tensors, shared.scale)
        inputs.check_gate_values(tensors, self.arguments)
        prepared = self._prepare(tensors, scale, shared.use_qk_l2norm_in_kernel)
        return _finish(recurrent_form(prepared, *self._initial_state(tensors, shared)), tensors.v, shared)

    def step(
        self,
        tensors: FirstOrderTensors,
        state: Tensor,
        scale: float | None,
        state_indices: Tensor | None,
        backend: str,
        check_gates: bool,
        normalise: bool = False,
    ) -> Tensor:
        """One token, ``[B, H, D]``; ``state`` ``[slots, HV, K, V]`` changes in place. Returns o ``[B, HV, V]``."""

        def prepare() -> StepFunction:
            return self._prepared_step(tensors, state, state_indices, scale, normalise, backend)

        if torch.compiler.is_compiling():
            run = prepare()
        else:
            refuse_transforms(f"{self.name}_step", f"recurrent_{self.name}", (*tensors, state))
            settings = (self.name, scale, type(scale), normalise, requested_backend(backend))  # True == 1
            run = prepared_once(settings, tensors, (state, state_indices), prepare)
        refuse_gradients(f"{self.name}_step", self.name, (*tensors, state), STEP_FIELDS, self.arguments)
        slots = _slots(state_indices, state, tensors.v, read=check_gates)
        if check_gates:
            inputs.check_gate_values(tensors, self.arguments)
        return run(tensors, state, slots)

    def backend_for(
        self, tensors: FirstOrderTensors, backend: str, *others: Tensor | None, decode: bool = False
    ) -> str:
        """``torch``, ``cpu`` or ``fla``; raises if the requested backend cannot run. ``others``: the state, the
        slots."""
        # What the native kernel does not know decides: a subclass, which need not have memory, or float64.
        subclasses = (x for x in (*tensors, *others) if isinstance(x, Tensor) and type(x) not in PLAIN_TYPES)
        wide = (x for x in (tensors.q, tensors.k, tensors.v) if x.dtype == torch.float64)
        chosen = resolve(backend, next(subclasses, next(wide, tensors.q)), self.name, decode=decode)
        return "torch" if tensors.q.is_meta else chosen  # meta tensors have shapes only, which torch knows

    # ------------------------------------------------------------------------------------------------------- the parts

    def check(self, tensors: FirstOrderTensors, scale: float | None, rank: int = 4) -> float:
        """Check everything but values and states; returns the scale as a number."""
        inputs.check_tensors(tensors, self.arguments, self.optional, rank)
        inputs.check_gate_shapes(tensors, self.arguments, self.vector)
        return check_scale(scale, tensors.q)

    def with_gates(self, tensors: FirstOrderTensors, raw: RawGates) -> FirstOrderTensors:
        """The tensors with a decay and a writing strength made from raw ones, where those were given."""
        if raw.use_gate_in_kernel or raw.use_beta_sigmoid_in_kernel:  # raw gates have the shapes of gates
            self.check(tensors, scale=None)
        log_alpha = tensors.log_alpha
        if raw.use_gate_in_kernel:
            if log_alpha is None:
                name = self.arguments["log_alpha"]
                raise ValueError(f"{name} must be a raw gate with use_gate_in_kernel=True, got None")
            log_alpha = log_decay_from(log_alpha, raw.A_log, raw.dt_bias, raw.lower_bound, self.vector)
        beta = writing_strength(tensors.beta, raw.use_beta_sigmoid_in_kernel, raw.allow_neg_eigval)
        return tensors._replace(log_alpha=log_alpha, beta=beta)

    def check_hints(self, hints: Mapping[str, Any]) -> None:
        """Further arguments of FLA's function: hints go to its kernels, and mean nothing elsewhere; others raise."""
        for name, value in hints.items():
            if name in REFUSED and value:
                raise ValueError(f"{name}={value!r} is not supported: {REFUSED[name]}")
            if name not in self.hints and name not in REFUSED:
                known = ", ".join(self.hints)
                raise ValueError(f"unknown argument {name!r}; beyond the signature FLA's hints are taken: {known}")

    def _prepare(self, tensors: FirstOrderTensors, scale: float, normalise: bool) -> PreparedTensors:
        return inputs.prepare(tensors, scale, normalise, self.erases, self.p_times_alpha)

    def _initial_state(
        self, tensors: FirstOrderTensors, shared: SharedArguments
    ) -> tuple[Tensor, SequenceBoundaries | None]:
        """The states before the first tokens ``[N, HV, K, V]``, and where the sequences of a pack begin."""
        boundaries = inputs.check_boundaries(shared.cu_seqlens, tensors.q)
        count = tensors.q.shape[0] if boundaries is None else boundaries.num_sequences
        return self._states(count, tensors, shared), boundaries

    def _states(self, count: int, tensors: FirstOrderTensors, shared: SharedArguments) -> Tensor:
        """The given initial states of ``count`` sequences, or zeros."""
        q, v, state = tensors.q, tensors.v, shared.initial_state
        shape, dtype = (count, v.shape[2], q.shape[3], v.shape[3]), compute_dtype(q, tensors.k, v)
        if state is None:
            return q.new_zeros(shape, dtype=dtype)
        if shared.state_v_first:
            check_initial_state(state, "N, HV, V, K", (*shape[:2], shape[3], shape[2]), q)
            state = state.transpose(-1, -2)
        else:
            check_initial_state(state, "N, HV, K, V", shape, q)
        given: Tensor = state.to(dtype)
        return given

    def _prepared_step(
        self,
        tensors: FirstOrderTensors,
        state: Tensor,
        state_indices: Tensor | None,
        scale: float | None,
        normalise: bool,
        backend: str,
    ) -> StepFunction:
        """Checks everything but values and binds what does not change."""
        factor = self.check(tensors, scale, rank=3)
        inputs.check_step_state(state, tensors, has_slots=state_indices is not None)
        slots = _slots(state_indices, state, tensors.v, read=False)
        chosen = with_states(self.backend_for(tensors, backend, state, slots, decode=True), backend, state)
        if chosen == "cpu" and not self.vector:
            options = RuleOptions(factor, 1, normalise, self.p_times_alpha)
            return native_step(tensors, state, slots, options, self.erases)

        def run(tensors: FirstOrderTensors, state: Tensor, slots: Tensor | None) -> Tensor:
            with torch.no_grad(), without_autocast(tensors.v):
                if chosen == "cpu":
                    prepared = self._prepare(tensors, factor, normalise)
                    return native_vector_step_(prepared, state, slots).to(tensors.v.dtype)
                return step_(self._prepare(tensors, 1.0, normalise), state, slots, factor).to(tensors.v.dtype)

        return run

    def _call_fla(
        self, tensors: FirstOrderTensors, shared: SharedArguments, hints: Mapping[str, Any]
    ) -> FirstOrderOutput:
        """Call FLA's ``chunk_<rule>`` by argument names; imported only now, because it brings Triton with it."""
        heads = tensors.v.shape[2]
        filled = tensors._replace(
            p=tensors.k if tensors.p is None else tensors.p,
            log_alpha=tensors.v.new_zeros(tensors.v.shape[:3]) if tensors.log_alpha is None else tensors.log_alpha,
            beta=tensors.v.new_ones(tensors.v.shape[:3]) if tensors.beta is None else tensors.beta,
        )
        named = {name: getattr(filled, field) for field, name in self.arguments.items()}
        if not self.fla_shares_keys:
            for field in ("q", "k"):
                named[self.arguments[field]] = inputs.expand_heads(getattr(tensors, field), heads)
        boundaries = None if shared.cu_seqlens is None else shared.cu_seqlens.to(tensors.q.device)
        compute = getattr(importlib.import_module(f"fla.ops.{self.name}"), f"chunk_{self.name}")
        o, final = compute(
            **named,
            scale=shared.scale,
            initial_state=shared.initial_state,
            output_final_state=shared.output_final_state,
            cu_seqlens=boundaries.cu_seqlens if isinstance(boundaries, SequenceBoundaries) else boundaries,
            **{option: getattr(shared, option) for option in self.fla_options},
            **hints,
        )
        return FirstOrderOutput(o, final if shared.output_final_state else None)


def _finish(computed: Computed, v: Tensor, shared: SharedArguments) -> FirstOrderOutput:
    o, final = computed
    final = final.transpose(-1, -2) if shared.state_v_first else final
    return FirstOrderOutput(o.to(v.dtype), final if shared.output_final_state else None)


def _slots(state_indices: Tensor | None, state: Tensor, v: Tensor, read: bool) -> Tensor | None:
    return None if state_indices is None else check_state_indices(state_indices, state, v.shape[0], read)
