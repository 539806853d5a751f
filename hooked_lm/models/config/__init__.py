"""Model configs: trees of component configs (`tree.py`), and the user-facing flat names such as `d_model` (`flat.py`)."""
