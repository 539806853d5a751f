"""The identities between sites, checked on a run of each kind of model."""
