import os
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.tiny import ARCHITECTURES, STATEFUL, tiny_config, tiny_model
from unsloth_trl.models import support
from unsloth_trl.models.support import (
    VERIFIED,
    Support,
    UnsupportedArchitectureWarning,
    check_architecture,
    check_packing,
    check_sharing,
    state_between_tokens,
    support_table,
    text_model_type,
)


TELL_TALES = re.compile(
    r"_is_stateful = True|causal_conv1d|chunk_gated_delta_rule|chunk_kda|selective_scan|ssm_state|conv_state"
    r"|recurrent_state|nn\.Conv1d|rwkv|LinearAttention|\"linear_attention\"|mlstm|lightning|rolling_polynomial_hash"
)

# Code that looks stateful and is not, in the text model.
NOT_STATEFUL = {
    "data2vec-text": "the convolutions are in the audio encoder",
    "gemma3n": "the convolutions are in the audio encoder",
    "gemma3n_text": "the convolutions are in the audio encoder",
    "gemma4": "the convolutions are in the audio encoder",
    "gemma4_text": "the convolutions are in the audio encoder",
    "minimax_m3_vl": "the lightning indexer chooses keys; nothing is carried over",
    "minimax_m3_vl_text": "the lightning indexer chooses keys; nothing is carried over",
    "moss_transcribe_diarize": "the convolutions are in the audio encoder",
    "muse_spark": "the convolutions are in the audio encoder",
    "phi4_multimodal": "the convolutions are in the audio encoder",
    "qwen2_5_omni_thinker": "the convolutions are in the audio encoder",
    "qwen3_omni_moe_thinker": "the convolutions are in the audio encoder",
    "whisper": "the convolutions are in the audio encoder",
}


def suspicious_model_types() -> list[str]:
    root = Path(transformers.__file__).parent / "models"
    found = []
    for model_type in {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}:
        files = (root / model_type_to_module_name(model_type)).glob("modeling_*.py")
        if any(TELL_TALES.search(file.read_text(encoding="utf-8")) for file in files):
            found.append(model_type)
    return found


def quiet(config, **kwargs) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsupportedArchitectureWarning)
        return check_packing(config, **({"strict": True, "allow_unverified": False} | kwargs))


def test_every_stateful_model_of_transformers_is_named():
    suspicious = suspicious_model_types()
    assert {"mamba", "qwen3_next", "lfm2", "rwkv", "recurrent_gemma", "kimi_linear"} <= set(suspicious)
    missed, wrong = [], []
    for model_type in suspicious:
        reason = state_between_tokens(AutoConfig.for_model(model_type))
        if reason is None and model_type not in NOT_STATEFUL:
            missed.append(model_type)
        if reason is not None and model_type in NOT_STATEFUL:
            wrong.append(model_type)
    assert missed == []
    assert wrong == []


def test_no_ordinary_model_is_called_stateful():
    suspicious = set(suspicious_model_types())
    checked = 0
    for model_type in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - suspicious):
        config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
        try:
            config = config_class()
        except (TypeError, ValueError, StrictDataclassError):  # cannot be built without arguments
            continue
        assert state_between_tokens(config) is None, model_type
        checked += 1
    assert checked > 100


def test_reasons():
    assert state_between_tokens(AutoConfig.for_model("jamba")) == "Mamba layers"
    assert state_between_tokens(AutoConfig.for_model("lfm2_vl")) == "short convolutions over tokens"
    assert state_between_tokens(AutoConfig.for_model("qwen3_5")) == "gated delta net layers"


def test_layers_decide_for_hybrids_of_both_kinds():
    layers = {"num_hidden_layers": 2}
    mamba = AutoConfig.for_model("granitemoehybrid", layer_types=["mamba", "attention"], **layers)
    attention = AutoConfig.for_model("granitemoehybrid", layer_types=["attention", "attention"], **layers)
    assert state_between_tokens(mamba).startswith("layers of type ")
    assert state_between_tokens(attention) is None


def test_models_with_code_on_the_hub():
    listed = SimpleNamespace(model_type="new", mixer_types=["attention", "gated_deltanet"])
    sized = SimpleNamespace(model_type="new", mamba_d_state=16)
    nested = SimpleNamespace(model_type="new_vl", llm_config=sized, audio_config=None)
    audio = SimpleNamespace(model_type="new_audio", audio_config=SimpleNamespace(model_type="a", ssm_state_size=4))
    assert state_between_tokens(listed) == "layers of type 'gated_deltanet'"
    assert state_between_tokens(sized) == "layers sized by config.mamba_d_state"
    assert state_between_tokens(nested) == "layers sized by config.mamba_d_state"
    assert state_between_tokens(audio) is None


def test_the_class_may_declare_state_that_the_config_does_not():
    class Recurrent(torch.nn.Module):
        _is_stateful = True

    config = SimpleNamespace(model_type="new")
    assert state_between_tokens(config) is None
    assert state_between_tokens(config, torch.nn.Sequential(Recurrent())) == "the state of Recurrent"


@pytest.mark.parametrize("model_type", STATEFUL)
def test_stateful_models_do_mix_samples_when_packed(model_type):
    """The refusal is not caution: a packed row really differs from separate rows."""
    model = tiny_model(model_type, attn_implementation="eager").eval()
    first, second = torch.arange(3, 10)[None], torch.arange(20, 29)[None]
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
    with torch.no_grad():
        packed = model(input_ids=torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits[:, 7:]
        alone = model(input_ids=second, use_cache=False).logits
    assert (packed - alone).abs().max() > 0.1


@pytest.mark.parametrize("allow_unverified", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_state_between_tokens_is_always_an_error(strict, allow_unverified):
    with pytest.raises(
        ValueError, match=r"packing=True is not possible for model_type 'kimi_linear': linear attention"
    ):
        check_packing(tiny_config("kimi_linear"), strict=strict, allow_unverified=allow_unverified)


@pytest.mark.parametrize(
    "config, reason",
    [
        (AutoConfig.for_model("gemma3_text", use_bidirectional_attention=True), "its attention is bidirectional"),
        (AutoConfig.for_model("llama4_text"), "layers of type 'chunked_attention'"),
    ],
    ids=["bidirectional", "chunked"],
)
def test_masks_that_packed_rows_lose_are_an_error(config, reason):
    with pytest.raises(ValueError, match=reason):
        check_packing(config, strict=False, allow_unverified=True)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_verified_architectures_pack_in_silence(model_type):
    model = tiny_model(model_type)
    assert quiet(model.config, model=model) is True


def test_unverified_architecture_trains_unpacked_with_a_warning():
    config = AutoConfig.for_model("gpt_neox")
    with pytest.warns(UnsupportedArchitectureWarning, match="'gpt_neox' is not among .* trains unpacked") as caught:
        assert check_packing(config, strict=False, allow_unverified=False) is False
    assert len(caught) == 1
    assert "allow_unverified=True" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_strict_refuses_an_unverified_architecture():
    with pytest.raises(ValueError, match="'gpt_neox' is not among .*strict=True.*packing=False"):
        quiet(AutoConfig.for_model("gpt_neox"))


@pytest.mark.parametrize("strict", [False, True])
def test_allow_unverified_packs_with_a_warning(strict):
    with pytest.warns(UnsupportedArchitectureWarning, match="'gpt_neox' is not among .*packs it anyway"):
        assert check_packing(AutoConfig.for_model("gpt_neox"), strict=strict, allow_unverified=True) is True


UNKNOWN, STATE = AutoConfig.for_model("gpt_neox"), tiny_config("kimi_linear")


@pytest.mark.parametrize(
    ("check", "config", "consequence", "what_to_do"),
    [
        (partial(check_architecture, strict=False), UNKNOWN, "slower and in more memory", "set allow_unverified=True"),
        (partial(check_architecture, strict=False), STATE, "Samples in one row would mix", "Set packing=False and"),
        (
            partial(check_architecture, strict=False, own_code=True),
            tiny_config("llama"),
            "may ignore what packed rows need",
            "Load it with trust_remote_code=False",
        ),
        (
            partial(check_packing, strict=False, allow_unverified=False),
            UNKNOWN,
            "trains unpacked: the result is right, but padding costs time",
            "allow_unverified=True packs it",
        ),
        (
            partial(check_packing, strict=False, allow_unverified=True),
            UNKNOWN,
            "samples mix silently",
            "Compare the loss of a few steps with packing=False",
        ),
        (
            partial(check_sharing, strict=False, allow_unverified=False),
            UNKNOWN,
            "the result is right, but takes more time and memory",
            "strict=True makes this an error, allow_unverified=True shares prompts",
        ),
        (
            partial(check_sharing, strict=False, allow_unverified=False),
            STATE,
            "the result is right, but takes more time and memory",
            "strict=True makes this an error",
        ),
        (
            partial(check_sharing, strict=False, allow_unverified=True),
            UNKNOWN,
            "completions of one prompt see each other silently",
            "Compare the loss of a few steps with share_prompts=False",
        ),
    ],
)
def test_a_warning_says_what_and_its_consequence_and_what_to_do(check, config, consequence, what_to_do):
    with pytest.warns(UnsupportedArchitectureWarning) as caught:
        check(config)
    (text,) = (str(warning.message) for warning in caught)
    assert text.startswith(f"model_type '{config.model_type}'") and text.endswith(".") and "\n" not in text
    assert text.index(consequence) < text.index(what_to_do)
    with warnings.catch_warnings(), pytest.raises(UnsupportedArchitectureWarning):
        warnings.simplefilter("error", UnsupportedArchitectureWarning)
        check(config)


@pytest.mark.parametrize("how", ["option", "environment"])
def test_pythons_own_option_makes_it_an_error(how):
    code = (
        "import unsloth_trl.models.support as support\n"
        "from types import SimpleNamespace\n"
        "support.check_architecture(SimpleNamespace(model_type='new'), strict=False)\n"
        "print('went on')"
    )
    command, env = [sys.executable, "-c", code], dict(os.environ)
    assert "went on" in subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    if how == "option":
        command[1:1] = ["-W", "error:model_type"]
    else:
        env["PYTHONWARNINGS"] = "error:model_type"
    failed = subprocess.run(command, capture_output=True, text=True, env=env)
    assert failed.returncode == 1 and "went on" not in failed.stdout
    assert "UnsupportedArchitectureWarning: model_type 'new' is not among the verified" in failed.stderr


def test_a_wrapper_is_verified_only_where_listed():
    kimi = tiny_config("kimi_k25")
    assert text_model_type(kimi) == "deepseek_v3"
    assert text_model_type(AutoConfig.for_model("gemma3")) == "gemma3"
    with pytest.raises(ValueError, match="'gemma3' is not among"):
        quiet(AutoConfig.for_model("gemma3"))
    other_text = AutoConfig.for_model("kimi_k25", text_config={"model_type": "gpt_neox"})
    with pytest.raises(ValueError, match="'kimi_k25' around text model 'gpt_neox' is not among"):
        quiet(other_text)


def test_a_feature_that_no_test_has_seen_is_unverified():
    assert quiet(tiny_config("mixtral")) is True
    with pytest.raises(ValueError, match="'mixtral' is verified without sliding_window, which this config sets"):
        quiet(tiny_config("mixtral", sliding_window=4))
    assert quiet(tiny_config("qwen3_moe", use_sliding_window=False, sliding_window=4)) is True


def test_the_table_states_the_features_of_the_tiny_models():
    assert set(VERIFIED) == set(ARCHITECTURES)
    for model_type in ARCHITECTURES:
        model = tiny_model(model_type)
        text_config = model.config.get_text_config()
        names = [name for name, _ in model.named_parameters()]
        seen = Support(
            sliding_window=bool(getattr(text_config, "sliding_window", None)),
            soft_cap=bool(getattr(text_config, "attn_logit_softcapping", None)),
            sinks=any(name.endswith("sinks") for name in names),
            moe=any(".experts." in name for name in names),
        )
        assert VERIFIED[model_type] == seen, model_type


def test_support_table_of_two(monkeypatch):
    monkeypatch.setattr(support, "VERIFIED", {"b": Support(sinks=True, moe=True), "a": Support(soft_cap=True)})
    assert support_table() == (
        "| `model_type` | packing | sliding window | soft cap | attention sinks | experts |\n"
        "|---|:-:|:-:|:-:|:-:|:-:|\n"
        "| a | yes | - | yes | - | - |\n"
        "| b | yes | - | - | yes | yes |"
    )


def test_importing_the_table_loads_no_framework():
    code = (
        "import sys; import unsloth_trl.models.support; "
        "print([m for m in ('torch', 'transformers', 'peft', 'trl') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
