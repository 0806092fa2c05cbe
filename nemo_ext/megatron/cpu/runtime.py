"""Single entry point that lets Megatron run on this machine, whatever it lacks."""

from nemo_ext.megatron.cpu import mamba_modules, patches


def enable() -> list[str]:
    """Installs replacements for what this machine lacks; on a full GPU install, none.

    Call it before anything imports Megatron's Mamba mixer, which binds the kernels' names at import.

    Returns:
        Names of the stand-in modules and of the patches applied.

    Raises:
        RuntimeError: the mixer was already imported.
    """
    return [*mamba_modules.install(), *patches.apply()]
