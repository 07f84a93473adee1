"""The `torch.backends` entry point, which torch calls at the end of `import torch`. An exception raised here would break
that import, so none leaves; with TORCH_FLASHSDPA unset this is one look into the environment."""

import os


def autoload():
    wish = os.environ.get("TORCH_FLASHSDPA", "").strip().lower()
    if wish in ("", "0", "off", "stock"):
        return
    try:
        import warnings

        backend = {"1": "auto", "on": "auto", "auto": "auto", "flashsdpa": "flashsdpa"}.get(wish)
        if backend is None:
            warnings.warn(
                f"TORCH_FLASHSDPA={wish!r} is not known and is ignored; use 1 or auto, flashsdpa, or 0",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        try:
            from .selection import enable

            enable(backend)
        except Exception as error:
            warnings.warn(
                f"TORCH_FLASHSDPA={wish}: torch_flashsdpa could not be enabled, attention stays stock: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
    except Exception:  # warnings turned into errors: still no reason to break `import torch`
        pass
