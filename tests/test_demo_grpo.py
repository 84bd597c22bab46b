import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, TrainerControl, TrainerState

from tests.tiny import tiny_model, tiny_tokenizer
from unsloth_trl import cli, demo, demo_grpo
from unsloth_trl.demo_folder import DemoError
from unsloth_trl.demo_grpo import Group, GrpoDemoResult, Requirement, Step


def make_steps(rewards, num_differing=3, grad_norm=0.5):
    return [Step(i, reward, num_differing, 4, 4.5, grad_norm, 100, 300) for i, reward in enumerate(rewards, 1)]


def test_parser_has_the_flag():
    parse = cli.build_parser().parse_args
    assert parse(["demo"]).grpo is False
    options = parse(["demo", "--grpo", "--max_steps", "3", "--model", "m", "--output_dir", "o", "--seed", "5"])
    assert (options.grpo, options.max_steps, options.model, options.output_dir) == (True, 3, "m", "o")


@pytest.mark.parametrize(("arguments", "called"), [(["demo"], "run_demo"), (["demo", "--grpo"], "run_grpo_demo")])
def test_main_runs_the_demo_that_is_asked_for(monkeypatch, arguments, called):
    calls = []
    monkeypatch.setattr(demo, "run_demo", lambda *options: calls.append(("run_demo", options)))
    monkeypatch.setattr(demo_grpo, "run_grpo_demo", lambda *options: calls.append(("run_grpo_demo", options)))
    assert cli.main([*arguments, "--max_steps", "4", "--seed", "2", "--output_dir", "o"]) == 0
    assert calls == [(called, (None, "o", 4, 2))]


def test_main_reports_an_error_in_one_line(tmp_path, capsys):
    assert cli.main(["demo", "--grpo", "--model", "./missing", "--output_dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("unsloth-trl demo: error: --model ./missing: there is no such folder")
    assert error.count("\n") == 1


def test_no_steps_are_an_error(tmp_path):
    with pytest.raises(DemoError, match="--max_steps 0 trains nothing; pass 1 or more"):
        demo_grpo.run_grpo_demo(output_dir=str(tmp_path / "out"), max_steps=0)
    assert not (tmp_path / "out").exists()


def test_prompts_share_solved_examples_and_ask_every_question_once():
    dataset, rows = demo_grpo.build_prompts(40, seed=0)
    assert len(rows) == 40
    shared = rows[0]["prompt"][:-1]
    assert [message["role"] for message in shared] == ["system", "user", "assistant", "user", "assistant"]
    examples = [message["content"] for message in shared[1:]]
    questions = [row["prompt"][-1]["content"] for row in rows]
    assert len({*questions, examples[0], examples[2]}) == 42
    for row in rows:
        assert row["prompt"][:-1] == shared
        assert row["prompt"][-1]["role"] == "user"
        assert row["prompt"][-1]["content"] == dataset[row["index"]]["question"].strip()
    for question, answer in zip(examples[::2], examples[1::2], strict=True):
        words = question.rsplit(": ", 1)[1].split(", ")
        assert answer == ", ".join(reversed(words)) and len(words) == 2


def test_prompts_leave_out_questions_that_came_before(monkeypatch):
    items = [{"question": f"{text}\n", "answer": text.upper()} for text in "abcacdbef"]
    monkeypatch.setattr("reasoning_gym.create_dataset", lambda task, size, seed, **options: items[:size])
    rows = demo_grpo.build_prompts(4, seed=0)[1]
    assert [(row["prompt"][-1]["content"], row["index"]) for row in rows] == [("c", 2), ("d", 5), ("e", 7), ("f", 8)]


def test_prompts_do_not_hold_their_answer():
    dataset, rows = demo_grpo.build_prompts(40, seed=0)
    for row in rows:
        text = "\n".join(message["content"] for message in row["prompt"])
        assert dataset[row["index"]]["answer"] not in text


def test_prompts_follow_the_seed():
    assert demo_grpo.build_prompts(5, seed=1)[1] == demo_grpo.build_prompts(5, seed=1)[1]
    assert demo_grpo.build_prompts(5, seed=1)[1] != demo_grpo.build_prompts(5, seed=7)[1]


def test_reward_is_the_score_of_reasoning_gym():
    dataset, rows = demo_grpo.build_prompts(2, seed=0)
    places = [row["index"] for row in rows]
    first, second = (dataset[place]["answer"] for place in places)
    groups = []
    reward = demo_grpo.make_reward(dataset, groups)
    texts = [f" {first}\n", f"{first}, {first}", "", ", ".join(reversed(second.split(", "))), second, f"{second}."]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    scores = reward(completions=completions, index=[places[0]] * 3 + [places[1]] * 3, prompts=None)
    # an answer inside a longer text gets its share of that text, anything else nothing
    partial = len(first) / (2 * len(first) + 2)
    assert scores == pytest.approx([1.0, partial, 0.0, 0.0, 1.0, len(second) / (len(second) + 1)])
    assert groups == [
        Group(first, [first, f"{first}, {first}", ""]),
        Group(second, [texts[3], second, f"{second}."]),
    ]


def test_step_table_shows_what_was_logged(capsys):
    trainer = SimpleNamespace(token_counts=SimpleNamespace(shared=0, unshared=0))
    table = demo_grpo.StepTable(trainer)
    args = SimpleNamespace(generation_batch_size=32, num_generations=8)
    state, control = TrainerState(max_steps=2), TrainerControl()
    table.on_train_begin(args, state, control)
    logged = [
        {"reward": 0.0625, "frac_reward_zero_std": 0.25, "completions/mean_length": 4.53, "grad_norm": 0.5034},
        {"reward": 0.75, "frac_reward_zero_std": 0.5, "completions/mean_length": 5.0, "grad_norm": 1.2},
    ]
    for number, (logs, counts) in enumerate(zip(logged, [(820, 5500), (2000, 11000)], strict=True), 1):
        state.global_step = number
        trainer.token_counts.shared, trainer.token_counts.unshared = counts
        table.on_step_end(args, state, control)
        table.on_log(args, state, control, logs=logs)
    table.on_log(args, state, control, logs={"train_runtime": 1.0})
    table.on_train_end(args, state, control)
    table.on_log(args, state, control, logs=logged[0])

    assert table.steps == [
        Step(1, 0.0625, 3, 4, 4.53, 0.5034, 820, 5500),
        Step(2, 0.75, 2, 4, 5.0, 1.2, 1180, 5500),
    ]
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert re.split("  +", lines[0].strip()) == list(demo_grpo._COLUMNS)
    assert re.split("  +", lines[2].strip()) == ["1", "0.062", "3 of 4", "4.5", "0.503", "820", "5,500"]
    assert re.split("  +", lines[3].strip()) == ["2", "0.750", "2 of 4", "5.0", "1.200", "1,180", "5,500"]
    assert len({len(line) for line in lines}) == 1 and len(lines) == 4
    assert "GRPO: 100%" in captured.err and "reward=0.750" in captured.err


def test_requirements_that_are_met():
    steps = make_steps([0.0, 0.2, 0.2, 0.5, 0.6, 0.8, 0.8, 1.0])
    assert demo_grpo.check_requirements(steps) == [
        Requirement(True, "rewards differ within 75% of 32 groups (required: 50%)"),
        Requirement(True, "grad_norm is above 0 at every step (smallest: 0.500)"),
        Requirement(
            True, "mean reward: 0.100 in the first third of the steps, 0.900 in the last (required: 0.10 more)"
        ),
    ]


def met(steps):
    return [requirement.met for requirement in demo_grpo.check_requirements(steps)]


def test_requirements_notice_groups_that_do_not_differ():
    assert met(make_steps([0.1, 0.5, 0.9], num_differing=2)) == [True, True, True]
    assert met(make_steps([0.1, 0.5, 0.9], num_differing=1)) == [False, True, True]


@pytest.mark.parametrize("norm", [0.0, math.nan])
def test_requirements_notice_a_step_without_gradient(norm):
    steps = make_steps([0.1, 0.5, 0.9, 0.9])
    steps[1], steps[3] = replace(steps[1], grad_norm=norm), replace(steps[3], grad_norm=norm)
    found = demo_grpo.check_requirements(steps)
    assert found[1] == Requirement(False, "grad_norm is not above 0 at step 2, 4")
    assert found[0].met and found[2].met


@pytest.mark.parametrize("rewards", [[0.5, 0.5, 0.5], [0.9, 0.5, 0.1], [0.1, 0.9, 0.19], [0.1, 0.5, math.nan]])
def test_requirements_notice_a_reward_that_does_not_rise(rewards):
    assert met(make_steps(rewards)) == [True, True, False]


def test_requirements_say_that_two_steps_are_too_few():
    found = demo_grpo.check_requirements(make_steps([0.1, 0.9]))
    expected = "whether the mean reward rises cannot be said: it takes 3 steps, there were 2"
    assert found[2] == Requirement(False, expected)


def make_result(steps, tmp_path, **changes):
    values = {
        "steps": steps,
        "requirements": demo_grpo.check_requirements(steps),
        "first": Group("a, b", ["b, a", "b, a", "a", "", "x"]),
        "last": Group("été, ß", ["été, ß"] * 5),
        "shared": 1_000,
        "unshared": 3_500,
        "train_seconds": 60.0,
        "total_seconds": 75.4,
        "patch_report": "unsloth_trl patches: none",
        "output_dir": tmp_path,
    }
    return GrpoDemoResult(**values | changes)


def test_summary_of_a_run_that_shows_everything(tmp_path):
    text = demo_grpo.format_result(make_result(make_steps([0.1, 0.5, 0.9]), tmp_path))
    lines = [re.split("  +", line) for line in text.splitlines()]
    assert lines[1] == ["met", "rewards differ within 75% of 12 groups (required: 50%)"]
    assert ["first prompt", 'expected "a, b", got 2x "b, a", 1x "a", 1x "", 1 other'] in lines
    assert ["last prompt", 'expected "été, ß", got 5x "été, ß"'] in lines
    assert ["tokens scored", "1,000 with shared prompts, 3,500 without (3.5 times as many)"] in lines
    assert ["time", "75 s in all, 20.0 s a step"] in lines
    assert ["adapter, reward.png", str(tmp_path)] in lines
    assert text.endswith("\n\nunsloth_trl patches: none")
    assert "NOT MET" not in text and "did not show" not in text


def test_summary_says_plainly_what_was_missed(tmp_path):
    text = demo_grpo.format_result(make_result(make_steps([0.5, 0.5, 0.5], num_differing=1), tmp_path))
    lines = text.splitlines()
    assert lines[1] == "NOT MET  rewards differ within 25% of 12 groups (required: 50%)"
    assert lines[2].startswith("met      grad_norm")
    assert lines[3].startswith("NOT MET  mean reward: 0.500 in the first third of the steps, 0.500 in the last")
    assert lines[4] == "This run did not show 2 of the 3 things that it should show."


def test_summary_without_sharing(tmp_path):
    text = demo_grpo.format_result(make_result(make_steps([0.1, 0.5, 0.9]), tmp_path, shared=0, unshared=0))
    assert "not counted, since prompts were not shared; the report below says why" in text


def test_plot_is_a_png(tmp_path):
    demo_grpo.write_plot(tmp_path / "reward.png", make_steps([0.1, 0.5, 0.9]))
    data = (tmp_path / "reward.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 5_000


class TokenReward:
    """A score that differs within most groups: whether the first token of an answer is an even word."""

    def __init__(self, dataset):
        self._dataset = dataset

    def __getitem__(self, place):
        return self._dataset[place]

    def score_answer(self, answer, entry):
        words = re.findall(r"w(\d+)", answer)
        return float(bool(words) and int(words[0]) % 2 == 0)


def test_run_grpo_demo_with_a_tiny_model(tmp_path, monkeypatch, capsys):
    folder, out = tmp_path / "model", tmp_path / "out"
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    build_prompts = demo_grpo.build_prompts
    # the tiny tokenizer knows none of the words of the task: its answers are scored by a rule of their own
    monkeypatch.setattr(
        demo_grpo,
        "build_prompts",
        lambda n, seed: [f(x) for f, x in zip((TokenReward, list), build_prompts(n, seed), strict=True)],
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = demo_grpo.run_grpo_demo(str(folder), str(out), max_steps=2, seed=3)

    assert [step.step for step in result.steps] == [1, 2]
    for step in result.steps:
        assert step.num_groups == demo_grpo.PROMPTS_PER_STEP and 1 <= step.num_differing <= step.num_groups
        assert 0 < step.reward < 1 and step.grad_norm > 0
        assert 1 <= step.mean_length <= demo_grpo.MAX_COMPLETION_LENGTH
        # eight completions repeat a prompt that is longer than they are
        assert 0 < 2 * step.shared < step.unshared
    assert result.shared == sum(step.shared for step in result.steps)
    assert result.unshared == sum(step.unshared for step in result.steps)
    assert [requirement.met for requirement in result.requirements] == [True, True, False]
    assert len(result.first.answers) == demo_grpo.NUM_GENERATIONS
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "adapter_model.safetensors").is_file()

    captured = capsys.readouterr()
    printed = captured.out.splitlines()
    table = [printed.index(demo_grpo.format_step(step)) for step in result.steps]
    assert table[1] == table[0] + 1
    assert "NOT MET  whether the mean reward rises cannot be said: it takes 3 steps, there were 2" in printed
    assert "This run did not show 1 of the 3 things that it should show." in printed
    assert re.search(r"^  applied +shared prompts", captured.out, re.M)
    assert "GRPO: 100%" in captured.err
    with pytest.raises(DemoError, match="holds the adapter of another run"):
        demo_grpo.run_grpo_demo(str(folder), str(out), max_steps=1)
