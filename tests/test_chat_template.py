import json
import re
from datetime import datetime

import pytest
from tiny_tokenizers import BOS, EOS, TOKENS, byte_level, write_tokenizer_gguf

from contbatch.errors import InvalidRequestError, ModelFileError
from contbatch.tokenizer import Tokenizer, load_tokenizer

CHATML = """{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' + message.content | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
HELLO = [{"role": "user", "content": " Hello "}]


def render(template, messages=HELLO, **variables):
    eos = TOKENS.index(EOS)
    tokenizer = Tokenizer(byte_level(), "the source", eos_token_id=eos, chat_template=template)
    return tokenizer.apply_chat_template(messages, **variables)


def test_renders():
    assert render(CHATML) == f"<|user|>Hello{EOS}<|assistant|>"
    assert render(CHATML, add_generation_prompt=False) == f"<|user|>Hello{EOS}"
    two = [*HELLO, {"role": "assistant", "content": "Hi"}]
    assert render(CHATML, two, add_generation_prompt=False) == f"<|user|>Hello{EOS}<|assistant|>Hi{EOS}"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}", "x\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": " Hello "}'),
        ("{{ 'é<' | tojson(indent=1) }}", '"é<"'),
        ("[{{ bos_token }}]", "[]"),
        ("{{ tools is none }}{{ documents is none }}{{ other is defined }}", "TrueTrueFalse"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}!", "user!"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "1"),
        ("{{ messages[0]['content'].strip().split('l') | join('-') }}", "He--o"),
    ],
)
def test_what_templates_in_use_expect(template, text):
    assert render(template) == text


def test_dates_and_switches():
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}
    assert render("{{ enable_thinking }}{{ tools[0] }}", enable_thinking=False, tools=["t"]) == "Falset"


def test_a_template_can_refuse():
    with pytest.raises(InvalidRequestError, match="refuses these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ cycler.__init__.__globals__.os.system('touch pwned') }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_attacks_raise_and_do_nothing(attack, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFileError, match="the source: the chat template failed"):
        render(attack)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("template", ["{% if %}", "{{ x", "{% nonsense %}", "{{ 'a' | nofilter }}", "{{" + "(" * 5000])
def test_malformed_templates(template):
    with pytest.raises(ModelFileError, match="the source: the chat template is malformed"):
        render(template)


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ missing.attribute }}", "{{ messages[7].role }}"])
def test_failing_templates(template):
    with pytest.raises(ModelFileError, match="the source: the chat template failed: "):
        render(template)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("Hello", "non-empty list .* got 'Hello'"),
        ({"role": "user", "content": "x"}, "non-empty list"),
        (None, "non-empty list"),
        (["Hello"], r"messages\[0\] must be a mapping .* got 'Hello'"),
        ([*HELLO, {"content": "x"}], r"messages\[1\]\['role'\] must be text, got None"),
        ([{"role": "user"}], r"messages\[0\]\['content'\] must be text, got None"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"'content'\] must be text, got \[{'type'"),
    ],
)
def test_bad_messages(messages, message):
    with pytest.raises(InvalidRequestError, match=message):
        render(CHATML, messages)


def test_messages_are_not_changed():
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ModelFileError):
        render("{{ messages[0].update(role='system') }}", messages)
    assert messages == [{"role": "user", "content": "x"}]


def test_no_template():
    with pytest.raises(InvalidRequestError, match="the source has no chat template: give the prompt as text"):
        render(None)


def test_where_templates_are_found(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}listed"}]
    for template, text in [("plain", "plain"), (named, f"{BOS}listed")]:
        config.write_text(json.dumps({"chat_template": template, "bos_token": BOS}))
        assert load_tokenizer(tmp_path).apply_chat_template(HELLO) == text
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert load_tokenizer(tmp_path).apply_chat_template(HELLO) == "own file"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match=re.escape("chat_template.jinja: not UTF-8")):
        load_tokenizer(tmp_path)
    path = write_tokenizer_gguf(tmp_path / "t.gguf", chat_template="{{ eos_token }}gguf")
    assert load_tokenizer(path).apply_chat_template(HELLO) == f"{EOS}gguf"
