"""What is installed, what works, what does not and what to do about it."""

import os
import platform
import shutil
from importlib import metadata

import torch

from . import __version__, _loader, auto_table, selection

ENCODER_NOTE = (
    "nn.TransformerEncoder and nn.MultiheadAttention in eval mode on the CPU may take torch's fast path, which never "
    "calls scaled_dot_product_attention; torch.backends.mha.set_fastpath_enabled(False) switches it off"
)
# Of these variables doctor tells the values; their names say nothing about the user.
ENVIRONMENT = ("TORCH_FLASHSDPA", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCHINDUCTOR_", "TORCHDYNAMO_", "OMP_", "MKL_", "KMP_",
               "CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE")  # fmt: skip


class Diagnosis(dict):
    """The answer of doctor(): a dict of sections; printed, a report. `healthy` tells whether attention can be served."""

    @property
    def healthy(self):
        return not self["problems"]

    def __str__(self):
        lines = [f"torch_flashsdpa {self['version']}"]
        for name, text in self["facts"].items():
            lines.append(f"  {name:<12} {text}")
        for title, mark in (("problems", "x"), ("notes", "-")):
            if self[title]:
                lines += ["", title, *(f"  {mark} {text}" for text in self[title])]
        lines += ["", "attention can be served" if self.healthy else "attention stays stock until this is mended"]
        return "\n".join(lines)


def doctor():
    """Examine the installation: versions, libraries, processor and GPU, the router, a small call checked against float64.

    Returns a Diagnosis, a dict with version, facts ({name: text}), problems and notes (lists of texts), kernels (the
    kernel table), status (selection.status()), packages ({name: version} of what meets ours in a program) and environment (the
    variables that bear on attention). Never raises for a broken installation. `doctor --json` prints it for a bug report.
    """
    library = _loader.load()
    problems = [] if library.problem is None else [library.problem]
    facts = {
        "torch": f"{torch.__version__}, {_cuda_text()}",
        "python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "kernels": _kernel_library_text(),
        "binding": f"loaded, {library.path}" if library.module else "not loaded",
    }
    kernels, notes = [], []
    if library.module is not None:
        _C = library.module
        kernels = _C.kernel_table()
        info = _C.build_info()
        facts["built"] = f"{info['build']}; version {info['library']}, binding for torch {info['torch']}"
        facts["processor"] = _processor_text(_C, kernels)
        facts["GPU"] = _gpu_text(kernels)
        if not any(entry["device"] == "cuda" for entry in kernels):
            notes.append("the kernels were built without CUDA (no nvcc was found): CUDA tensors are served by stock PyTorch")
        facts["table"] = f"{len(auto_table.rows())} recorded runs behind \"auto\""
        problem = _try_a_call()
        facts["self-test"] = "a small call agrees with float64" if problem is None else "failed"
        problems += [problem] if problem else []
    now = selection.status()
    facts["selection"] = _selection_text(now)
    if now["stock_only"]:
        notes.append(now["stock_only"])
    return Diagnosis(
        version=__version__,
        facts=facts,
        problems=problems,
        notes=notes + _environment_notes(now) + [ENCODER_NOTE],
        kernels=kernels,
        status=now,
        packages=_packages(),
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT)},
    )


def _packages():
    versions = {}
    for name in ("torch", "triton", "numpy", "transformers", "diffusers", "timm", "accelerate", "xformers", "flash-attn"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cuda_text():
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"


def _kernel_library_text():
    path = _loader.kernel_library()
    if path.exists():
        return str(path)
    return f"missing, {path}; install the package again, or build it with CMake"


CPU_ISAS = ("portable", "avx2", "avx512", "amx")


def cpu_isa(kernels):
    """The instruction set that CPU kernels use on this machine: the best that is available, by name."""
    available = [entry["isa"] for entry in kernels if entry["device"] == "cpu" and entry["available"]]
    return max(available, key=lambda isa: CPU_ISAS.index(isa) if isa in CPU_ISAS else -1, default="none")


def _processor_text(_C, kernels):
    features = [name for name, present in _C.cpu_features().items() if present]
    cap = os.environ.get("TORCH_FLASHSDPA_CPU_ISA")
    capped = f", capped by TORCH_FLASHSDPA_CPU_ISA={cap}" if cap in CPU_ISAS else ""
    return f"uses {cpu_isa(kernels)}{capped}; has {' '.join(features) or 'no vector extension'}; {torch.get_num_threads()} threads"


def _gpu_text(kernels):
    if not torch.cuda.is_available():
        return "none that torch can use"
    usable = {entry["isa"] for entry in kernels if entry["device"] == "cuda"}
    texts = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        served = "served" if f"sm{major}{minor}" in usable else "no kernel for it, stock PyTorch serves"
        texts.append(f"{torch.cuda.get_device_name(index)} (compute capability {major}.{minor}, {served})")
    return "; ".join(texts)


def _selection_text(now):
    return f"{selection.describe(now)}; router {'installed' if now['router'] else 'not installed'}"


def _environment_notes(now):
    notes = []
    if not _loader.kernel_library().exists() and (hidden := _loader.hidden_installation()):
        notes.append(f"these sources hide the installed package in {hidden.parent}; run from another folder, or with `python -P`")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        notes.append("TORCH_DEVICE_BACKEND_AUTOLOAD=0: torch loads no entry points, so TORCH_FLASHSDPA has no effect; call enable()")
    elif os.environ.get("TORCH_FLASHSDPA") and not _entry_point_installed():
        notes.append(
            "TORCH_FLASHSDPA is set, but the package is not installed (only on the path), so torch cannot find its entry "
            "point; call enable(), or install the package"
        )
    cap = os.environ.get("TORCH_FLASHSDPA_CPU_ISA")
    if cap and cap not in CPU_ISAS:
        notes.append(f"TORCH_FLASHSDPA_CPU_ISA={cap} is not known and is ignored; use {', '.join(CPU_ISAS)}")
    if now["problem"] and shutil.which("g++") is None:
        notes.append("g++ is not on the PATH; `python -m torch_flashsdpa build` needs it")
    return notes


def _entry_point_installed():
    return any(point.value.startswith("torch_flashsdpa.") for point in metadata.entry_points(group="torch.backends"))


def _try_a_call():
    """Run forward and backward once on a small call; None if they agree with float64, else what went wrong."""
    from ._attention import attention
    from .bench import formula

    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 2, 17, 16, generator=generator, requires_grad=True) for _ in range(3)]
    try:
        out = attention(*leaves, is_causal=True)
        grads = torch.autograd.grad(out.sum(), leaves)
        exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
        exact = formula.attention(*exact_leaves, is_causal=True)
        exact_grads = torch.autograd.grad(exact.sum(), exact_leaves)
        worst = max((a - b).abs().max().item() for a, b in zip((out, *grads), (exact, *exact_grads)))
    except Exception as error:
        return f"a small call raised {type(error).__name__}: {' '.join(str(error).split())}"
    return None if worst < 1e-4 else f"a small call is off by {worst:.2g} against float64"
