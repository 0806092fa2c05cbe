"""Megatron binds mamba_ssm's names when its mixer is first imported, by whichever test: the stand-ins come before."""

from nemo_ext.megatron.cpu import mamba_modules

mamba_modules.install()
