"""Default values of arguments."""

from hooked_lm.compat.attributes import get_nested_attr, override_or_use_default_value, set_nested_attr
from hooked_lm.utils import USE_DEFAULT_VALUE, LocallyOverridenDefaults
