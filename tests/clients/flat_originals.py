"""Run in a process of its own: TransformerLens itself, its folder first on the path, saves toys and loads them as from the hub.

`python flat_originals.py FOLDER TASKS`: TASKS is a folder with `cases.json`, {name: {"repository", "fields", "format"}}. What is
left there: for each name a directory as the repository lays it out, and `logits.safetensors` with what the loaded models say.
"""

import json
import sys
from pathlib import Path

FOLDER, TASKS = sys.argv[1:]
sys.path.insert(0, FOLDER)

import torch  # noqa: E402
import transformer_lens as lens  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformer_lens import loading_from_pretrained as loading  # noqa: E402
from transformer_lens.supported_models import MODEL_ALIASES  # noqa: E402

FILES = {0: "model_final.pth", 1: "checkpoints/toy_000010.pth", 2: "checkpoints/toy_000200.pth"}
TOKENS = torch.randint(30, (3, 12), generator=torch.Generator().manual_seed(3))


def random_weights(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return {name: value.clone() for name, value in model.state_dict().items()}


def early(state):
    """The norms' name, and all matrices the other way round."""
    found = {}
    for name, value in state.items():
        name = name.replace("ln_final.", "norm.").replace(".ln", ".norm")
        found[name] = value.transpose(-2, -1).contiguous() if "W_" in name else value
    return found


def mingpt(state):
    found = {"tok_emb.weight": state["embed.W_E"], "pos_emb": state["pos_embed.W_pos"][None]}
    found |= {"head.weight": state["unembed.W_U"].T}
    found |= {"ln_f.weight": state["ln_final.w"], "ln_f.bias": state["ln_final.b"]}
    for block in {name.rpartition(".attn")[0] for name in state if ".attn." in name}:
        for ln in ("ln1", "ln2"):
            found[f"{block}.{ln}.weight"], found[f"{block}.{ln}.bias"] = (
                state[f"{block}.{ln}.w"],
                state[f"{block}.{ln}.b"],
            )
        for theirs, ours in {"query": "Q", "key": "K", "value": "V"}.items():
            found[f"{block}.attn.{theirs}.weight"] = state[f"{block}.attn.W_{ours}"].transpose(1, 2).flatten(0, 1)
            found[f"{block}.attn.{theirs}.bias"] = state[f"{block}.attn.b_{ours}"].flatten()
        found[f"{block}.attn.proj.weight"] = state[f"{block}.attn.W_O"].flatten(0, 1).T
        found[f"{block}.attn.proj.bias"] = state[f"{block}.attn.b_O"]
        for theirs, ours in {"0": "in", "2": "out"}.items():
            found[f"{block}.mlp.{theirs}.weight"] = state[f"{block}.mlp.W_{ours}"].T
            found[f"{block}.mlp.{theirs}.bias"] = state[f"{block}.mlp.b_{ours}"]
    return {name: value.clone() for name, value in found.items()}


FORMATS = {"public": lambda state: state, "early": early, "mingpt": mingpt}


def write(folder, case):
    """The toy's weights, three times anew."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(case["config"]))
    model = lens.HookedTransformer(lens.HookedTransformerConfig.from_dict(case["fields"])).eval()
    for seed, file in FILES.items():
        torch.save(FORMATS[case["format"]](random_weights(model, seed)), folder / file)


def serve(folder, repository):
    """A hub that has this directory under that name."""

    def download(name, file, **options):
        assert name == repository, name
        is_json = file.endswith(".json")
        return json.loads((folder / file).read_text()) if is_json else torch.load(folder / file)

    loading.utils.download_file_from_hf = download
    loading.HfApi.list_repo_files = lambda self, name, **options: sorted(FILES.values())


@torch.no_grad()
def main(tasks: Path) -> None:
    found = {}
    for name, case in json.loads((tasks / "cases.json").read_text()).items():
        write(tasks / name, case)
        serve(tasks / name, case["repository"])
        load = lens.HookedTransformer.from_pretrained_no_processing
        found[f"{name}.as_is"] = load(case["repository"], device="cpu")(TOKENS)
        if case["repository"].startswith("NeelNanda/"):  # of others it knows no checkpoints
            found[f"{name}.step"] = load(case["repository"], device="cpu", checkpoint_value=200)(TOKENS)
        found[f"{name}.folded"] = lens.HookedTransformer.from_pretrained(case["repository"], device="cpu")(TOKENS)
    save_file({name: value.contiguous() for name, value in found.items()}, tasks / "logits.safetensors")
    ours = ("NeelNanda/", "ArthurConmy/", "Baidicoot/")
    aliases = {name: short for name, short in MODEL_ALIASES.items() if name.startswith(ours)}
    (tasks / "aliases.json").write_text(json.dumps(aliases))


main(Path(TASKS))
