"""The configs of models: trees of component configs (`tree.py`), and the table of flat names that users know (`flat.py`)."""
