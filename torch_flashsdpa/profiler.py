"""Which of our kernels ran, told by torch's profiler and not by our own bookkeeping."""

import collections
import contextlib
import re

_NAME = re.compile(r"\bflashsdpa_\w+")


class KernelsRun(collections.Counter):
    """Kernel name -> number of executions, filled when the block of kernels_run() ends."""

    def starting_with(self, prefix):
        """How many kernels ran whose name starts with `prefix`, for instance "flashsdpa_fwd"."""
        return sum(count for name, count in self.items() if name.startswith(prefix))


def kernels_in(profile):
    """A KernelsRun of what a finished torch.profiler.profile recorded, of CPU and, where there is a GPU, CUDA activity."""
    from torch.autograd import DeviceType

    kernels = KernelsRun()
    for event in profile.events():
        name = _NAME.search(event.name)
        if name is None:
            continue
        # A CUDA kernel's name may also be on the host's span around its launch: only the device counts.
        on_host = event.device_type == DeviceType.CPU
        if on_host == ("_cpu" in name[0]):
            kernels[name[0]] += 1
    return kernels


@contextlib.contextmanager
def kernels_run():
    """Profile the block; afterwards the yielded KernelsRun counts the flashsdpa_* kernels that ran in it.

        with torch_flashsdpa.profiler.kernels_run() as kernels:
            model(x)
        print(kernels)  # {'flashsdpa_fwd_cpu_avx2': 6}
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    kernels = KernelsRun()
    with profile(activities=activities) as recorded:
        yield kernels
        if len(activities) > 1:
            torch.cuda.synchronize()  # kernels still running would be missing from the record
    kernels.update(kernels_in(recorded))


@contextlib.contextmanager
def assert_kernel(prefix, times=None):
    """Raise AssertionError unless a kernel whose name starts with `prefix` ran in the block (exactly `times` times)."""
    with kernels_run() as kernels:
        yield kernels
    ran = kernels.starting_with(prefix)
    if ran == 0 if times is None else ran != times:
        wanted = "at least once" if times is None else f"{times} times"
        raise AssertionError(f"{prefix}* ran {ran} times, expected {wanted}; kernels seen: {dict(kernels) or 'none'}")
