"""Evaluations."""

from hooked_lm.compat.evals import (
    DATASET_LOADERS,
    DATASET_NAMES,
    evaluate,
    evaluate_on_dataset,
    induction_loss,
    make_code_data_loader,
    make_owt_data_loader,
    make_pile_data_loader,
    make_wiki_data_loader,
    sanity_check,
)
from hooked_lm.compat.ioi import IOIDataset, ioi_eval
from hooked_lm.compat.mmlu import MMLU_ANSWER_LETTERS, MMLU_SUBJECTS, make_mmlu_data_loader, mmlu_eval
from transformer_lens import utils
from transformer_lens.utilities import warn_if_mps
