"""The import path of a stage of your own, which every rank must find."""

import importlib.util

from terapipe.errors import SpecError


def stage_path(stage: str | type) -> str:
    """The import path "package.module:Class" of a stage that every rank can import.

    Raises
    ------
    SpecError
        For a class defined in a notebook cell or script, which other processes cannot import.
    """
    if not isinstance(stage, str):
        module, name = getattr(stage, "__module__", None), getattr(stage, "__qualname__", repr(stage))
        if module in (None, "__main__", "builtins") or "<locals>" in name:
            raise SpecError(
                f"stage {name!r} is defined in a notebook cell or inside a function, where the ranks' processes cannot "
                "import it. Put it into a file beside the notebook, e.g. my_stage.py, and pass stage='my_stage:"
                f"{name.split('.')[-1]}'."
            )
        stage = f"{module}:{name}"
    module_name, colon, class_name = stage.partition(":")
    if not colon or not class_name:
        raise SpecError(f"stage={stage!r}: needs an import path 'package.module:Class'.")
    if module_name == "__main__":
        raise SpecError(f"stage={stage!r}: ranks cannot import __main__. Put the class into a file and name that module.")
    try:
        found = importlib.util.find_spec(module_name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise SpecError(f"stage={stage!r}: no module {module_name!r} can be imported. Is its folder on sys.path?")
    return stage
