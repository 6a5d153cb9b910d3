"""The built-in task: right values, disjoint splits."""

from nanorl.config import ArithmeticData
from nanorl.data import build_data
from nanorl.data.arithmetic import ArithmeticTask, all_problems, problems_by_form


def test_every_label_is_the_expression_s_value_within_bounds():
    for split in ("train", "heldout"):
        for expression, result in all_problems(split):
            assert eval(expression) == result
            assert 0 <= result <= 99


def test_the_splits_are_disjoint_and_a_tenth_is_held_out():
    train, heldout = set(all_problems("train")), set(all_problems("heldout"))
    assert not train & heldout
    assert train | heldout == {problem for form in problems_by_form() for problem in form}
    assert 0.08 < len(heldout) / (len(train) + len(heldout)) < 0.12


def test_the_split_never_changes():
    """Held out by md5 of the text: a model warm-started by another version must not have seen these."""
    assert len(all_problems("train")) == 1928
    assert len(all_problems("heldout")) == 205
    assert ("(2 * 5) - 1", 9) in all_problems("heldout")


def test_all_four_forms_are_held_out_even_in_a_short_evaluation():
    texts = [str(prompt.metadata["expression"]) for prompt in ArithmeticTask(seed=0).heldout(32)]
    forms = {(text[0] == "(", "+" in text) for text in texts}
    assert len(forms) == 4


def test_the_prompt_asks_and_the_label_answers():
    prompt = next(p for p in ArithmeticTask(seed=0).next(1928) if p.metadata["expression"] == "60 - (5 * 7)")
    assert prompt.messages == ({"role": "user", "content": "What is 60 - (5 * 7)?"},)
    assert prompt.label == "25"


def test_the_config_s_default_source_is_arithmetic_with_heldout_prompts_outside_the_seed():
    first, second = (build_data(ArithmeticData(), seed) for seed in (0, 1))
    assert first.heldout(8) == second.heldout(8)
    assert first.next(8) != second.next(8)
