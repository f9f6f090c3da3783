"""How a notebook shows a choice, after `%load_ext attnlib`."""

from IPython.core.interactiveshell import InteractiveShell

import attnlib
from attnlib.lab import choice_card
from attnlib.lab.cards import as_text

CALL = "heads=32/8 head_dim=128 page=16 lens=8192x16"


def card_of(library, **how):
    return choice_card.card_of(attnlib.explain(CALL, gpu="h200", library=library, **how))


def test_the_rule_that_chose_stands_first():
    card = card_of("flashinfer==0.6.3")
    assert card.title == "flashinfer==0.6.3 on sm90, decode: fa3"
    assert card.table.iloc[0].tolist()[:2] == ["fa3", "yes"]
    assert set(card.table.chosen[1:]) == {"no"}
    assert dict(card.facts)["decided by"] == card.table["why, or why not"][0]


def test_a_limit_that_holds_chose_nothing():
    call = "model=DeepSeek-V3.2 tp=8 lens=8192x4"
    choice = attnlib.explain(call, gpu="h200", library="vllm==0.33.0")
    rules = choice_card.rules_of(choice)
    refused = rules[rules["why, or why not"] == "not sparse"]
    assert len(refused) and set(refused.chosen) == {"no"}


def test_rules_of_other_gpus_are_counted_and_not_shown():
    call = "model=DeepSeek-V3.2 tp=8 lens=8192x4"
    choice = attnlib.explain(call, gpu="h200", library="vllm==0.33.0")
    card = choice_card.card_of(choice)
    rules = choice_card.rules_of(choice)
    left_out = rules["why, or why not"].str.startswith("needs gpu ").sum()
    assert left_out > 1
    assert not card.table["why, or why not"].str.startswith("needs gpu ").any()
    assert card.footer.endswith(f"{len(rules)} in all, {left_out} of them for other GPUs.")


def test_a_long_order_is_cut_and_says_how_many_follow():
    assert card_of("vllm==0.33.0").table["rule for"].iloc[0] == "FLASH_ATTN > FLASHINFER > 3 more"


def test_a_shell_shows_it_as_html_and_as_text():
    shell = InteractiveShell()
    choice_card.register(shell)
    choice = attnlib.explain(CALL, gpu="h200", library="flashinfer==0.6.3")
    shown, _ = shell.display_formatter.format(choice)
    assert "attnlib-card" in shown["text/html"]
    assert shown["text/plain"] == as_text(choice_card.card_of(choice))
