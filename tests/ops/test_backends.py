"""Which backend runs, what it says about it, and how little importing the ops brings along."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from conformance import Case, check, public_function
from definition import make_inputs
from mdn.ops import backends, chunk_momentum_delta_rule, cpu, explain_backend, fused_recurrent_momentum_delta_rule
from mdn.ops.triton import availability


def forced(backend: str, form=chunk_momentum_delta_rule) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller reads the message
        form(**make_inputs(T=4), backend=backend)
    return str(caught.value)


@pytest.mark.parametrize("form", [chunk_momentum_delta_rule, fused_recurrent_momentum_delta_rule])
def test_an_unknown_backend_is_refused_with_the_list_of_known_ones(form) -> None:
    assert forced("cuda", form) == "backend must be one of auto, torch, cpu, triton, fla, got 'cuda'"
    with pytest.raises(ValueError, match="backend must be one of auto, torch, cpu, triton, fla, got 'gpu'"):
        explain_backend(torch.ones(1), "gpu")


@pytest.mark.parametrize("form", [chunk_momentum_delta_rule, fused_recurrent_momentum_delta_rule])
def test_triton_by_name_raises_with_the_reason_on_a_cpu_tensor(form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert forced("triton", form).startswith("backend='triton' cannot be used here: the tensors are on cpu")


def test_triton_by_name_raises_when_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdn.ops.triton.availability.triton_version", lambda: None)
    assert "Triton is not installed (pip install 'momentum-deltanet[triton]'" in forced("triton")


def test_fla_serves_the_first_order_rules_only() -> None:
    assert "FLA's kernels serve the first-order rules, not the momentum delta rule" in forced("fla")


def test_the_native_kernel_by_name_refuses_what_it_cannot_compute() -> None:
    with pytest.raises(ValueError, match=r"backend='cpu' cannot be used here: .*float64"):
        chunk_momentum_delta_rule(**make_inputs(T=4, dtype=torch.float64), backend="cpu")


def test_a_missing_native_kernel_makes_auto_choose_torch_and_a_request_by_name_fail(monkeypatch) -> None:
    monkeypatch.setattr(cpu, "why_unavailable", lambda: "no compiler when it was installed")
    x = torch.ones(1)
    assert explain_backend(x) == "auto -> torch: cpu cannot be used: no compiler when it was installed"
    assert forced("cpu") == "backend='cpu' cannot be used here: no compiler when it was installed"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_explain_says_in_one_line_what_auto_really_runs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from mdn.ops.momentum import custom_op

    inputs = make_inputs(T=4, dtype=dtype)
    line = explain_backend(inputs["q"])
    assert "\n" not in line
    asked: list[str] = []
    monkeypatch.setattr(
        custom_op, "backend_module", lambda name, family: asked.append(name) or backends.backend_module(name, family)
    )
    chunk_momentum_delta_rule(**inputs)
    assert line.startswith(f"auto -> {asked[0]}: ")


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_explain_does_not_deny_a_backend_that_works(backend: str) -> None:
    """What auto leaves out it may not call impossible."""
    x = torch.ones(1, dtype=torch.bfloat16)
    if backends.why_not(backend, x) is None:
        assert explain_backend(x, backend) == f"{backend}: usable"
        assert "only" not in explain_backend(x)


def test_explain_answers_for_every_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "why_unavailable", lambda: None)
    x = torch.ones(1)
    assert explain_backend(x, rule="gated_delta_rule").startswith("auto -> cpu: ")
    assert explain_backend(x.bfloat16(), rule="gated_delta_rule").startswith("auto -> cpu: ")
    assert explain_backend(x.half(), rule="gated_delta_rule").startswith("auto -> torch: ")
    assert explain_backend(x.to("meta"), rule="gated_delta_rule").startswith("auto -> torch: ")
    assert explain_backend(x, rule="kda").startswith("auto -> cpu: ")
    assert explain_backend(x.double(), "cpu", "kda").startswith("cpu: not usable, the native kernel takes float32")
    assert "not the first-order rules" in explain_backend(x, "triton", "comba")
    with pytest.raises(ValueError, match=r"rule must be one of momentum, linear_attn, .*, got 'mamba'"):
        explain_backend(x, rule="mamba")


def test_the_environment_replaces_auto_and_an_argument_wins_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("MDN_BACKEND", "triton")
    assert explain_backend(torch.ones(1)).startswith("MDN_BACKEND='triton': not usable, the tensors are on cpu")
    assert forced("auto").startswith("MDN_BACKEND='triton' cannot be used here: the tensors are on cpu")
    chunk_momentum_delta_rule(**make_inputs(T=4), backend="torch")
    monkeypatch.setenv("MDN_BACKEND", "cuda")
    assert forced("auto") == "MDN_BACKEND must be one of auto, torch, cpu, triton, fla, got 'cuda'"


def decode(rule: str):
    """One token of the rule through its public step, with a state that is thrown away."""
    inputs = make_inputs(rule, T=1)
    token = {name: x[:, 0] for name, x in inputs.items() if name != "initial_state"}
    return public_function(rule, "step")(**token, state=inputs["initial_state"])


def decode_by_the_lean_form(rule: str):
    return fused_recurrent_momentum_delta_rule(**make_inputs(rule, T=2)).o


STEPS = [(decode, "momentum"), (decode, "vector"), (decode, "gated_delta_rule"), (decode_by_the_lean_form, "momentum")]


@pytest.mark.parametrize(("step", "rule"), STEPS)
def test_the_environment_is_read_at_every_decode_step(step, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("MDN_BACKEND", "torch")
    step(rule)
    monkeypatch.setenv("MDN_BACKEND", "triton")
    with pytest.raises(ValueError, match="MDN_BACKEND='triton' cannot be used here"):
        step(rule)
    monkeypatch.setenv("MDN_BACKEND", "cuda")
    with pytest.raises(ValueError, match=r"MDN_BACKEND must be one of .*, got 'cuda'"):
        step(rule)


@pytest.mark.parametrize("step", [decode, decode_by_the_lean_form])
def test_the_next_decode_step_runs_on_the_backend_that_the_environment_names_now(step, monkeypatch) -> None:
    ran: list[bool] = []

    def step_(*arguments):
        ran[-1] = True
        return backends.backend_module("torch").step_(*arguments)

    with backends.registered_backend("mine", SimpleNamespace(step_=step_)):
        for name in ("torch", "mine", "torch"):
            monkeypatch.setenv("MDN_BACKEND", name)
            ran.append(False)
            step("momentum")
    assert ran == [False, True, False]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Tensors of a GPU that is not there, with the compute capability and the Triton version of a test."""

    def pretend(capability: tuple[int, int], version: tuple[int, int, int]) -> dict[str, torch.Tensor]:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.delenv("MDN_BACKEND", raising=False)
        monkeypatch.setattr(backends, "_warned", set())
        made = make_inputs(T=4)
        with FakeTensorMode():
            tensors = {name: torch.empty(x.shape, dtype=x.dtype, device="cuda") for name, x in made.items()}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(availability, "triton_version", lambda: version)
        return tensors

    return pretend


@pytest.mark.parametrize(
    ("capability", "version", "reason"),
    [((10, 0), (3, 7, 1), "install Triton 3.8 or newer"), ((7, 5), (3, 9, 0), "this GPU has compute capability 7.5")],
)
def test_auto_warns_once_when_it_leaves_the_kernels_out_on_a_gpu(gpu, caplog, capability, version, reason) -> None:
    tensors = gpu(capability, version)
    for _ in range(2):
        chunk_momentum_delta_rule(**tensors, check_gates=False)
        fused_recurrent_momentum_delta_rule(**tensors, check_gates=False)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("mdn", "WARNING")
    assert record.getMessage().startswith('backend="auto" runs torch on this GPU: triton cannot be used: ')
    assert reason in record.getMessage()
    assert record.getMessage().endswith("set MDN_BACKEND=torch")


def test_auto_does_not_warn_where_the_kernels_run_nor_of_a_choice_or_a_question(gpu, caplog, monkeypatch) -> None:
    chunk_momentum_delta_rule(**gpu((9, 0), (3, 7, 1)), check_gates=False)
    refused = gpu((7, 5), (3, 9, 0))
    chunk_momentum_delta_rule(**refused, check_gates=False, backend="torch")
    assert explain_backend(refused["q"]).startswith("auto -> torch: triton cannot be used: ")
    monkeypatch.setenv("MDN_BACKEND", "torch")
    chunk_momentum_delta_rule(**refused, check_gates=False)
    assert caplog.records == []


def test_a_backend_can_be_registered_for_a_while_and_auto_never_selects_it() -> None:
    inputs = make_inputs(T=4)
    with backends.registered_backend("mine", backends.backend_module("torch")):
        assert explain_backend(inputs["q"], "mine") == "mine: usable"
        assert "mine" not in explain_backend(inputs["q"])
        o = chunk_momentum_delta_rule(**inputs, backend="mine").o
        assert torch.equal(o, chunk_momentum_delta_rule(**inputs, backend="torch").o)
        with pytest.raises(ValueError, match="it was registered for the rule of the paper, without direct"):
            chunk_momentum_delta_rule(**make_inputs("general", T=4), backend="mine")
        assert "it was not registered for scalar decay rules" in explain_backend(inputs["q"], "mine", "comba")
    assert forced("mine") == "backend must be one of auto, torch, cpu, triton, fla, got 'mine'"


@pytest.mark.parametrize("rule", ["momentum", "vector"])
def test_a_backend_that_takes_over_a_name_runs_at_the_next_call(rule: str) -> None:
    """Chunks and steps of shapes that the one before it has seen."""
    family = backends.family_of("momentum" if rule == "momentum" else "vector_momentum")
    trusted, ran = backends.backend_module("torch", family), []

    def noting(name: str) -> SimpleNamespace:
        def forward(*arguments):
            ran.append(name)
            return trusted.forward(*arguments)

        def step_(*arguments):
            ran.append(name)
            return trusted.step_(*arguments)

        return SimpleNamespace(forward=forward, step_=step_)

    inputs = make_inputs(rule, T=1) | {"direct": None}
    token = {name: None if x is None else x[:, 0] for name, x in inputs.items() if name != "initial_state"}
    for name in ("first", "second"):
        with backends.registered_backend("mine", noting(name), family):
            public_function(rule, "chunk")(**inputs, backend="mine")
            public_function(rule, "step")(**token, state=inputs["initial_state"].clone(), backend="mine")
    assert ran == ["first", "first", "second", "second"]


def test_a_backend_for_rules_that_would_not_call_it_is_refused() -> None:
    for family in ("scalar decay", "vector decay", "kda"):
        registration = backends.registered_backend("mine", SimpleNamespace(), family)
        with pytest.raises(ValueError, match=f"family must be 'momentum' or 'vector momentum' .*, got '{family}'"):
            registration.__enter__()


@pytest.mark.native
def test_explain_says_that_a_subclass_need_not_have_memory() -> None:
    x = TwoTensor(torch.ones(1), torch.ones(1))
    reason = "the native kernel reads memory, which a TwoTensor need not have"
    assert explain_backend(x, rule="kda") == f"auto -> torch: cpu cannot be used: {reason}"
    assert explain_backend(x, "cpu", rule="gated_delta_rule") == f"cpu: not usable, {reason}"
    assert explain_backend(x).startswith("auto -> cpu")  # inside a custom op


def test_explain_gives_the_reason_against_a_backend() -> None:
    assert explain_backend(torch.ones(1), "triton").startswith("triton: not usable, ")
    assert explain_backend(torch.ones(1), "torch") == "torch: usable"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_automatic_backend_computes_the_definition(dtype: torch.dtype) -> None:
    check(Case(T=70, dtype=dtype), "auto")
    check(Case(lengths=(1, 69, 0, 20), dtype=dtype), "auto")


LIGHT = """
import sys
import {module}
heavy = ("transformers", "triton", "matplotlib", "fla", "datasets", "accelerate")
print(*(name for name in heavy if name in sys.modules))
"""


@pytest.mark.parametrize("module", ["mdn", "mdn.ops"])
def test_importing_the_ops_is_light(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT.format(module=module)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
