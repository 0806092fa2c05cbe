"""The one switch that lets Megatron run on this machine, whatever it lacks."""

from nemo_ext.megatron.cpu import mamba_modules, patches


def enable() -> list[str]:
    """Puts in what this machine lacks and says what that was; on a full GPU install, nothing.

    Call it before anything imports Megatron's Mamba mixer, which binds the kernels' names once.

    Returns:
        Names of the stand-in modules and of the patches applied.

    Raises:
        RuntimeError: if the mixer was imported before.
    """
    return [*mamba_modules.install(), *patches.apply()]
