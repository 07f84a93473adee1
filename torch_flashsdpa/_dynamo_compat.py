"""Every private name of torch that this package touches, in one place. Where one is missing the answer is "cannot", and
selection.py falls back to throwing compiled code away on every change (torch.compiler.reset)."""

import re
import sys

import torch

_TAG = re.compile(r"\+flashsdpa\[.*?\]")


def dynamo_loaded():
    """Whether compiled code can exist in this process. Importing torch._dynamo costs seconds, so it is never forced."""
    return "torch._dynamo" in sys.modules


def drop_compiled_code():
    """Forget all compiled functions; they are compiled again when next called."""
    if dynamo_loaded():
        torch.compiler.reset()


def can_guard():
    """Whether install_guard has what it needs in this torch. True as long as nothing was compiled."""
    return not dynamo_loaded() or _guard_parts() is not None


def _guard_parts():
    try:
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.source import AttrSource
        from torch._dynamo.symbolic_convert import InstructionTranslator

        return InstructionTranslator.current_tx, AttrSource, GuardBuilder.CONSTANT_MATCH, install_guard
    except (ImportError, AttributeError):
        return None


def install_guard(module, *attributes):
    """Let the function that Dynamo is tracing on this thread depend on `module.attributes[0]. ...` , a constant.

    Returns whether a function was being traced. Attributes may be properties: they are read again on every call of the
    compiled function, on the calling thread.
    """
    parts = _guard_parts() if dynamo_loaded() else None
    if parts is None:
        return False
    current_tx, attr_source, constant_match, install = parts
    try:
        tx = current_tx()
    except AttributeError:
        tx = None
    if tx is None:  # AOTAutograd's own pass, make_fx, a plain FakeTensorMode: nobody to guard
        return False
    source = tx.import_source(module)
    for attribute in attributes:
        source = attr_source(source, attribute)
    install(source.make_guard(constant_match))
    return True


def in_transform():
    """Whether a transform of torch.func is running on this thread, or in the function that Dynamo traces."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def innermost(tensor):
    """The tensor that the transforms of torch.func have wrapped, or `tensor` itself."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def dispatches_in_python(tensor):
    """Whether the tensor's type has a __torch_dispatch__ of its own, as fake tensors and wrappers have."""
    return type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def innermost_dispatching(tensors):
    """The innermost of each tensor or None, as a list; None where no type of theirs dispatches in Python."""
    inner = [None if t is None else innermost(t) for t in tensors]
    return inner if any(t is not None and dispatches_in_python(t) for t in inner) else None


def tracing_context():
    """The torch._guards.TracingContext of the compilation running on this thread, or None."""
    try:
        return torch._guards.TracingContext.try_get()
    except AttributeError:
        return None


def compile_context():
    """The torch._guards.CompileContext of the frame that is compiled on this thread, its guards included, or None."""
    try:
        return torch._guards.CompileContext.try_get()
    except AttributeError:
        return None


def set_cache_tag(text):
    """Make torch's compile caches on disk tell our selections apart. They are keyed on Dynamo's graph, which says
    scaled_dot_product_attention whatever is selected. Set on the thread that compiles: the setting is per thread."""
    config = getattr(torch.compiler, "config", None)
    if hasattr(config, "cache_key_tag"):
        config.cache_key_tag = f"{_TAG.sub('', config.cache_key_tag or '')}+flashsdpa[{text}]"


def allow_in_graph(*functions):
    """Have Dynamo put calls of these functions into its graph. Only called while Dynamo is loaded."""
    for function in functions:
        torch.compiler.allow_in_graph(function)


def register_sharding(op, rule, *keywords):
    """torch's register_sharding, for an op whose outputs also depend on these keyword arguments: DTensor remembers what
    it has worked out by the tensors and whole numbers of a call alone."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(op)(rule)
    if keywords:
        propagator = DTensor._op_dispatcher.sharding_propagator
        remembered_by = propagator.op_to_schema_info[op]
        remembered_by.static_kwargkey = [*(remembered_by.static_kwargkey or ()), *keywords]
        propagator.propagate_op_sharding = _Remembered(propagator, op)


class _Remembered:
    """DTensor's memory in front of an op's sharding rule. torch 2.11 asks it with a list among the keyword arguments, of which it
    can make no key; that is worked out every time."""

    def __init__(self, propagator, op):
        self._propagator, self._op, self._memory = propagator, op, propagator.propagate_op_sharding

    def __call__(self, schema):
        if schema.op is self._op:
            try:
                hash(schema)
            except TypeError:
                return self._propagator.propagate_op_sharding_non_cached(schema)
        return self._memory(schema)

    def __getattr__(self, name):
        return getattr(self._memory, name)


def constant_for_dynamo(function):
    """Mark a function that Dynamo runs while tracing, instead of tracing it. The public way to say so,
    torch.compiler.assume_constant_result, sets this attribute too but imports torch._dynamo."""
    function._dynamo_marked_constant = True
    return function


def dispatch_kernels(name="aten::scaled_dot_product_attention"):
    """Which kernel the dispatcher holds for the operator: {dispatch key: where it was registered}."""
    try:
        lines = torch._C._dispatch_dump(name).splitlines()
    except Exception:
        return {}
    return dict(line.split(": ", 1) for line in lines if ": " in line)
