"""A saved directory in other people's programs: without the import, without the package, with another umask."""

import json
import os
import stat
import string
import subprocess
import sys
import textwrap

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from small_models import small_config, small_model, tokens


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A small hybrid over single letters, with its tokenizer."""
    folder = tmp_path_factory.mktemp("saved")
    letters = [*string.ascii_lowercase, " ", "<end>"]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    small_model("hybrid", vocab_size=len(letters)).save_pretrained(folder)
    return folder


PROGRAM = """
    import importlib, json, sys
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, pipeline

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "mdn":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def failure(**options):
        try:
            AutoConfig.from_pretrained(sys.argv[1], **options)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    absent = Absent()
    sys.meta_path.insert(0, absent)
    report = {"untrusted": failure(trust_remote_code=False), "absent": failure(trust_remote_code=True)}
    sys.meta_path.remove(absent)
    assert "mdn" not in sys.modules

    generate = pipeline("text-generation", sys.argv[1], trust_remote_code=True)
    report["text"] = generate("hello", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    report["classes"] = [
        type(kind.from_pretrained(sys.argv[1], trust_remote_code=True)).__module__
        for kind in (AutoConfig, AutoModel, AutoModelForCausalLM)
    ]
    generate.model.save_pretrained(sys.argv[2])
    print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def elsewhere(directory, tmp_path_factory):
    """What a program reports that never imports mdn, and the directory that it saved."""
    again = tmp_path_factory.mktemp("again")
    environment = {**os.environ, "HF_HOME": str(tmp_path_factory.mktemp("home")), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(directory), str(again)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1]), again


def test_a_pipeline_finds_the_model_without_the_import(elsewhere, directory):
    report, _ = elsewhere
    model = AutoModelForCausalLM.from_pretrained(directory)
    ids = [[string.ascii_lowercase.index(letter) for letter in "hello"]]
    expected = model.generate(tokens(1, 5).new_tensor(ids), max_new_tokens=4, do_sample=False)
    letters = [*string.ascii_lowercase, " "]
    assert report["text"] == "".join(letters[i] for i in expected[0] if i < len(letters))
    assert report["classes"] == ["mdn.models.config", "mdn.models.modeling", "mdn.models.modeling"]


def test_generation_stops_at_a_given_string(directory):
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    ids = tokenizer("hello", return_tensors="pt")["input_ids"]
    new = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, 5:]
    stop = tokenizer.decode(new[3])
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    stopped = model.generate(ids, stop_strings=[stop], tokenizer=tokenizer, **settings)[0, 5:]
    assert stopped.tolist() == new[: new.tolist().index(new[3]) + 1].tolist()


def test_where_the_package_is_missing_the_error_says_how_to_install_it(elsewhere):
    report, _ = elsewhere
    assert report["absent"].startswith("ImportError")
    assert "pip install momentum-deltanet" in report["absent"]
    assert "trust_remote_code=True" in report["untrusted"]


def test_a_directory_saved_by_such_a_program_is_like_the_first(elsewhere, directory):
    _, again = elsewhere
    code = "modeling_momentum_deltanet.py"
    assert {path.name for path in again.glob("*.py")} == {code}
    assert (again / code).read_text() == (directory / code).read_text()
    saved, first = (json.loads((folder / "config.json").read_text()) for folder in (again, directory))
    assert saved["auto_map"] == first["auto_map"]
    assert set(saved["auto_map"]) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_saved_files_have_the_permissions_that_the_umask_allows(umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        small_model().save_pretrained(tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert set(modes.values()) == {mode}, modes
    assert "model.safetensors" in modes


def test_saving_leaves_the_permissions_of_other_files_alone(tmp_path):
    script = tmp_path / "run.sh"
    script.touch(0o700)
    tmp_path.chmod(0o700)
    small_model().save_pretrained(tmp_path)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path, script)] == [0o700, 0o700]


def test_saving_leaves_the_config_in_memory_as_it_was(tmp_path):
    config = small_config()
    before = config.to_dict()
    config.save_pretrained(tmp_path)
    assert config.to_dict() == before


def test_the_model_can_be_exported(tmp_path):
    model, ids = small_model(), tokens(1, 20)
    program = torch.export.export(model, (ids,), kwargs={"use_cache": False})
    torch.export.save(program, tmp_path / "model.pt2")
    logits = torch.export.load(tmp_path / "model.pt2").module()(ids, use_cache=False).logits
    torch.testing.assert_close(logits, model(ids).logits)
