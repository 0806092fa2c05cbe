"""`checked`, under the name that the sources and filters of conversations import it by."""

from nemo_ext.data.checked import checked

__all__ = ("checked",)
