"""Many small changes of one run, computed exactly and together; patching, attribution and circuits run on it."""
