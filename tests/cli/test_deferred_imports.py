"""Commands import only what they use; what is deferred works once it is used."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.processes import run

UNUSED = {
    "scipy": "losses of object detectors",
    "sklearn": "assisted generation",
    "sympy": "the compiler, DTensor",
    "torch._dynamo.config": "the compiler; only torch._dynamo itself is there, not loaded",
    "torch._inductor": "the compiler",
    "torch.distributed.checkpoint": "sharded models",
    "torch.distributed.fsdp": "sharded models",
    "torch.distributed.tensor": "sharded models",
    "matplotlib": "plots",
    "pandas": "datasets",
}
"""Modules that take long to import, and what needs them."""


def modules_after(*words: object) -> set[str]:
    """Return the modules that a command has imported at its end, in a process of its own."""
    code = f"""
import contextlib, io, json, sys
from tokenformer.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    main({[str(word) for word in words]})
print(json.dumps(sorted(sys.modules)))
"""
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("command", ["inspect", "generate", "int8", "evaluate", "grow"])
def test_a_command_imports_only_what_it_uses(command: str, parrot: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Say it. " * 20)
    prompt = ("--prompt", "Say", "--max_new_tokens", 1)
    words = {
        "inspect": ("inspect", "124m"),
        "generate": ("generate", parrot, *prompt),
        "int8": ("generate", parrot, *prompt, "--bits", 8),
        "evaluate": ("evaluate", parrot, "--perplexity", text),
        "grow": ("grow", parrot, "--ffn_tokens", 512, "--out", tmp_path / "grown"),
    }[command]
    imported = modules_after(*words)
    assert not UNUSED.keys() & imported
    assert "torch" in imported
    assert command == "grow" or "accelerate" not in imported  # saving asks it for wrapped models
    assert command != "inspect" or "transformers.modeling_utils" not in imported


PRELUDE = """
import sys
from tokenformer.cli.deferred_imports import DeferredName, defer_imports
defer_imports()
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(FOLDER).eval()
ids = torch.arange(10)[None]
def loaded(name):
    return name in sys.modules
"""
USES = {
    "names": """
assert not loaded("scipy") and not loaded("sympy") and not loaded("torch.distributed.tensor")

import typing
deferred = DeferredName("torch.distributed.tensor", "DTensor")
assert typing.get_args(deferred | None)[0].__forward_arg__ == "DTensor"
assert typing.get_args(int | deferred)[1].__forward_arg__ == "DTensor"
assert repr(deferred) == "<deferred torch.distributed.tensor.DTensor>"
assert not loaded("torch.distributed.tensor")

from transformers.loss import loss_for_object_detection as loss, loss_rt_detr as other
assert type(loss.linear_sum_assignment) is type(other.linear_sum_assignment) is DeferredName
rows, columns = loss.linear_sum_assignment(torch.tensor([[4.0, 1.0], [2.0, 7.0]]))
assert columns.tolist() == [1, 0]
import scipy.optimize
assert loss.linear_sum_assignment is scipy.optimize.linear_sum_assignment
assert other.linear_sum_assignment is scipy.optimize.linear_sum_assignment

again = AutoModelForCausalLM.from_pretrained(FOLDER, device_map="auto")
assert loaded("accelerate")
assert torch.equal(again(ids).logits, model(ids).logits)

from transformers.distributed import sharding_utils
from transformers.distributed.utils import is_dtensor
deferred = sharding_utils.DTensor
assert type(deferred) is DeferredName
assert not isinstance(ids, (str, deferred)) and not issubclass(int, deferred)
assert not is_dtensor(ids)
assert not loaded("torch.distributed.tensor")
class Subclass(deferred):
    pass
from torch.distributed.tensor import DTensor
assert Subclass.__mro__[1] is sharding_utils.DTensor is DTensor
assert issubclass(Subclass, deferred) and deferred.from_local == DTensor.from_local
assert not is_dtensor(ids)

from transformers import masking_utils
assert type(masking_utils.TransformGetItemToIndex) is DeferredName
allowed = torch.eye(4, dtype=torch.bool)
with masking_utils.TransformGetItemToIndex():
    assert torch.equal(torch.vmap(lambda i: allowed[i])(torch.arange(4)), allowed)
assert type(masking_utils.TransformGetItemToIndex) is type
""",
    "parallel styles": """
from transformers.distributed import mixin
assert type(mixin.ALL_PARALLEL_STYLES) is DeferredName
assert "tokens" in model.tp_plan.values()
model.tp_plan = model.tp_plan  # checks the names of the styles
assert type(mixin.ALL_PARALLEL_STYLES["tokens"]).__name__ == "TokenParallel"
assert "grouped_gemm" in mixin.ALL_PARALLEL_STYLES
assert type(mixin.apply_tensor_parallelism) is type(loaded)

optimizer = torch.optim.AdamW(model.parameters())
model(ids, labels=ids).loss.backward()
optimizer.step()
assert loaded("torch._dynamo.config")
""",
    "expert styles first": """
from transformers.distributed import mixin
assert mixin.apply_expert_parallelism.__name__ == "apply_expert_parallelism"
assert {"grouped_gemm", "colwise", "tokens"} <= set(mixin.ALL_PARALLEL_STYLES)
""",
    "the compiler": """
@torch.compiler.disable
def disabled():
    return torch.compiler.is_compiling()
@torch.compiler.disable(recursive=False)
def disabled_alone():
    return torch.compiler.is_compiling()
@torch._dynamo.assume_constant_result
def constant():
    return 3
assert disabled() is False and disabled.__name__ == "disabled"
assert not isinstance(model, torch._dynamo.eval_frame.OptimizedModule)
assert not loaded("torch._dynamo.config")

with torch.no_grad():
    expected = model(ids).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids).logits, expected)
assert isinstance(compiled, torch._dynamo.eval_frame.OptimizedModule)

from transformers import PreTrainedModel
marked = PreTrainedModel.can_record_outputs.fget
assert torch._dynamo.trace_rules.is_callable_allowed(marked)
@torch.compiler.disable
def later():
    return torch.compiler.is_compiling()
@torch.compile(backend="eager")
def use(x):
    return x + constant(), disabled(), disabled_alone(), later(), torch.compiler.is_compiling()
assert use(torch.zeros(()))[1:] == (False, False, False, True)
assert constant._dynamo_marked_constant
""",
}


SLOW = ("the compiler", "parallel styles", "expert styles first")


@pytest.mark.parametrize(
    "use", [pytest.param(use, marks=pytest.mark.slow) if use in SLOW else use for use in USES]
)
def test_what_is_deferred_works_when_it_is_used(use: str, parrot: Path) -> None:
    code = f"FOLDER = {str(parrot)!r}\n{PRELUDE}{USES[use]}\nprint('done')"
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
