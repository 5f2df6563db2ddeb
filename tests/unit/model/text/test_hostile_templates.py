"""Templates written to exhaust time or memory: each is one error, soon, within the memory of one text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from model.errors import ModelError
from model.text.chat_template import MAX_SOURCE_CHARS, ChatTemplate
from model.text.tokenizer import Tokenizer
from tests.support import make_tokenizers
from tests.support.served import REPOSITORY

MEMORY_BYTES = 2 << 30
RENDER_S = 0.1
CPU_S = 4
"""RENDER_S, one operation on the longest value, and a busy machine."""
BIG = "{% set big = 'a' * 10000000 %}"
TWICE = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = "

WIDTHS = ["'a'.WORD(10**9)", "'a'.WORD(10**9, 'b')", "('a' * 10).WORD(10**12)"]
OPERATIONS = [
    *(width.replace("WORD", word) for word in ("center", "ljust", "rjust", "zfill") for width in WIDTHS),
    "'\t'.expandtabs(10**9)",
    "('a' * 10**6).translate({97: 'b' * 10**4})",
    "('a' * 10**5).replace('a', 'b' * 10**5)",
    "('a' * 10**5).replace('', 'b' * 10**5)",
    "('b' * 10**5).join('a' * 10**5)",
    "('b' * 10**5).join(range(10**5) | map('string'))",
    "'{:>1000000000}'.format(1)",
    "'{:{}}'.format(1, 10**9)",
    "'{0:>{1}}'.format('a', 10**9)",
    "'{:.1000000000f}'.format(1.5)",
    "'{a:>1000000000}'.format_map({'a': 1})",
    "('{0}' * 10**6).format('a' * 10**6)",
    "('{0!r}' * 10**6).format('a' * 10**6)",
    "'%1000000000d' % 1",
    "'%*d' % (10**9, 1)",
    "'%.1000000000f' % 1.5",
    "('%(a)s' * 10**6) % {'a': 'b' * 10**6}",
    "('%9999d' * 10**6) % ((1,) * 10**6)",
    "'%1000000000d' | format(1)",
    "('%(a)s' * 10**6) | format(a='b' * 10**6)",
    "'a' | center(10**9)",
    "('a\n' * 10**5) | indent(10**6)",
    "('a\n' * 10**5) | indent('b' * 10**6)",
    "('\u2028' * 10**5) | indent('b' * 10**6)",
    "('a' * 10**6) | wordwrap(1, wrapstring='b' * 10**6)",
    "('a ' * 10**7) | wordwrap(2)",
    "('a' * 10**5) | replace('a', 'b' * 10**6)",
    "('a' * 10**5) | join('b' * 10**6)",
    "range(10**5) | join('b' * 10**6)",
    "range(10**5) | map('string') | join('b' * 10**6)",
    "[1] | batch(10**9, 0) | list",
    "[1] | slice(10**9) | list",
    "[1] | slice(10**9, 0) | list",
    "[1, [2]] | tojson(indent=10**9)",
    "[1, [2]] | tojson(indent='a' * 10**9)",
    "range(10**5) | list | tojson(separators=['a' * 10**6, ':'])",
    "range(10**5) | list | tojson(separators=['a' * 60, ':'], indent=64)",
    "1.5 | round(10**9)",
    "1.5 | round(10**9, 'ceil')",
    "('9' * 10**7) | int",
    "('f' * 10**7) | int(base=16)",
    "range(10**5) | map('center', 10**6) | list",
    "range(10**5) | map('center', 10**6) | join",
    "([[1] * 10**4] * 10**3) | sum(start=[])",
    "range(10**9) | list",
    "range(10**5) | list | map('list') | list",
    "(1).to_bytes(10**10, 'big')",
    "'a'.encode().center(10**9)",
    "dict.fromkeys(range(10**5), 1).fromkeys('a')",
    "lipsum(10**9)",
    "strftime_now('%0999999999Y' * 10**6)",
    "('<' * 10**6) | e | e | e | e | e | e | e",
    "('<' * 10**6) | safe * 10**6",
    "('a b ' * 4000000).split()",
    "('a\n' * 4000000).splitlines()",
    "('é' * 4000000) | list",
    "10**9**9",
    "9**9**9",
    "'a' * 10**9",
    "('a', ) * 10**9",
    "'x' ~ 'a' * 10**8",
    "messages.append(1)",
    "cycler(*range(10**5)).__class__",
    "'a'.maketrans('a', 'b')",
    "'' | attr('center')(10**9)",
    "(['a'] | map(attribute='center') | first)(10**9)",
    "''['center'](10**9)",
    "('a' * 10**7) | urlize",
    "('a' * 10**7) | pprint",
    "{'a': 'b' * 10**7} | xmlattr",
    "('%(' * 10**6) % {'a': 1}",
    "('%(' ~ 'a' * 1000 ~ ')s') % {'a': 1}",
    "('%r' * 10**5) % (('a' * 1000,) * 10**5)",
    "'%s' % range(10**5) | map('center', 1000)",
]
TEMPLATES = [
    *(f"{{{{ {operation} }}}}" for operation in OPERATIONS),
    *(f"{{% set x = {made} %}}" * 200 for made in ("'a'.center(10**7)", "'a' * 10**7", "'a' | center(10**7)")),
    *(
        TWICE + grown + " %}{% endfor %}{{ ns.x | length }}"
        for grown in (
            "ns.x + ns.x", "ns.x ~ ns.x", "ns.x * 2", "ns.x.replace('a', 'aa')", "'%s%s' % (ns.x, ns.x)",
            "'{0}{0}'.format(ns.x)", "[ns.x, ns.x] | join", "ns.x.join([ns.x, ns.x])", "ns.x | replace('a', 'aa')",
        )
    ),
    TWICE + "[ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    TWICE + "[ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    TWICE + "(ns.x, ns.x) %}{% endfor %}{{ ns.x == ns.x }}{{ {ns.x: 1} }}",
    TWICE + "{'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x }}",
    TWICE + "dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x | string }}",
    TWICE + "namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    TWICE + "[ns.x, ns.x].copy() %}{% endfor %}{{ ns.x == [ns.x] }}",
    "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x % 7 }}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}a{% endmacro %}{{ m(40) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if i == j %}{% endfor %}{% endfor %}",
    BIG + "{% for i in range(99999) %}{% if big == big[:-1] ~ 'b' %}{% endif %}{% endfor %}",
    BIG + "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + [big[i:]] %}{% endfor %}",
    BIG + "".join(f"{{% set a{i} = big[{i}:] %}}" for i in range(1, 2000)),
    BIG + "{% for i in range(99999) %}{% set x = big.count('ab') %}{% endfor %}",
    BIG + "{% set ns = namespace(d={}) %}{% for i in range(999) %}{% set ns.d = dict(ns.d, **{i | string: big[i:]}) %}"
    "{% endfor %}",
    "{% filter center(10**9) %}a{% endfilter %}",
    "{% set x | center(10**9) %}a{% endset %}",
    "{% call(x) m() %}{% endcall %}{% macro m() %}{{ caller('a'.center(10**9)) }}{% endmacro %}",
]  # fmt: skip
RUN = """
import json, resource, sys, time
from pathlib import Path
import jinja2
from model.text.chat_template import ChatTemplate, TemplateError
from model.text.template_bounds import RenderLimits
from model.text.tokenizer import Tokenizer
tokenizer = Tokenizer.read(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
for source in json.load(sys.stdin):
    started, refusal = time.process_time(), ""
    try:
        template = ChatTemplate({"default": source}, tokenizer, RenderLimits(max_s=float(sys.argv[3])))
        template.render([{"role": "user", "content": "hello"}])
    except (TemplateError, jinja2.TemplateSyntaxError) as error:
        refusal = repr(error.__cause__ or error)
    except Exception as error:
        refusal = "not refused: " + repr(error)
    print(json.dumps([source[:90], round(time.process_time() - started, 2), refusal[:200]]), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tokenizers.qwen_style(tmp_path_factory.mktemp("tokenizer") / "qwen")


@pytest.mark.parametrize("part", range(4))
def test_none_takes_much_time_or_memory(folder, part):
    """Run under a memory limit, so that an unbounded operation fails here and not on the machine."""
    command = [sys.executable, "-c", RUN, str(folder), str(MEMORY_BYTES), str(RENDER_S)]
    sent = json.dumps(TEMPLATES[part::4])
    done = subprocess.run(command, input=sent, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    received = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(received) == len(TEMPLATES[part::4]), done.stderr
    assert [line for line in received if line[1] > CPU_S or "MemoryError" in line[2] or "not refused" in line[2]] == []


HARMLESS = [
    "'abc'.center(9) ~ 'b'.ljust(3, '-') ~ '7'.zfill(3) ~ 'a\tb'.expandtabs(4) ~ 'b'.rjust(3)",
    "'a,b,,c'.split(',') ~ 'a b  c'.split() ~ 'a-b'.rsplit('-', 1) ~ 'a\nb\r\n'.splitlines() ~ 'a=b'.partition('=')",
    "'banana'.replace('a', 'o', 2) ~ 'abc'.replace('', '.') ~ 'abc'.translate({97: 'xy', 98: none})",
    "', '.join(['a', 'b']) ~ ','.join('abc') ~ ','.join(['a', 'b'] | map('upper'))",
    "'{:>5}|{!r}|{a.b}|{0[0]}'.format('ab', 'é', a={'b': 1}) ~ '{a}'.format_map({'a': [1, 'x']})",
    "'%s %5d %-4s|%r %(a)s' | replace('%(a)s', '') ~ ('%s %5d %-4s|%r' % ('a', 7, 'b', 'c')) ~ ('%(a)s' % {'a': 1})",
    "'%s-%s' | format(1, 'b')",
    "'  ab '.strip() ~ 'xxabxx'.strip('x') ~ 'ab'.title() ~ 'AB'.lower() ~ 'ß'.upper() ~ 'ab'.startswith('a')",
    "[3, 1, 2] | sort ~ [3, 1, 2] | sort(reverse=true) | join('-') ~ [1, 2, 3] | sum ~ [[1], [2]] | sum(start=[])",
    "{'b': 1, 'a': 2} | dictsort ~ {'a': 1}.items() | list ~ {'a': 1} | items | list ~ {'a': 1}.get('b', 3)",
    "[1, 2, 3, 4, 5] | batch(2, 0) | list ~ [1, 2, 3, 4, 5] | slice(2) | list",
    "'a\nb' | indent(2, true) ~ ('aa bb cc' | wordwrap(5)) ~ ('abcdef' | truncate(5)) ~ ('a' | center(5)) ~ '<' | e",
    "1.2345 | round(2) ~ '12' | int + 1 ~ '1.5' | float ~ ('ff' | int(base=16)) ~ -3 | abs ~ 7 // 2 ~ 7 % 4 ~ 2 ** 10",
    "[{'a': 1}, {'a': 2}] | selectattr('a', 'equalto', 2) | list ~ [{'a': 1}] | map(attribute='a') | list",
    "[1, 2, 2] | unique | list ~ 'abc' | reverse ~ 'abc' | first ~ 'abc' | last ~ 'abc' | length ~ [1] * 3 ~ 'a' * 3",
    "'abcdef'[1:4] ~ [1, 2, 3][::-1] ~ (1, 2) + (3,) ~ [1] + [2] ~ 'a' ~ 1 ~ none ~ true",
    "[[1, 'a'], {'b': (1, 2)}] ~ namespace(a=1) ~ dict(a=1) ~ range(3) ~ range(3) | list ~ cycler(1, 2).next()",
    "'a b' | urlencode ~ {'a': 'b c'} | urlencode ~ '<b>x</b>' | striptags ~ 'a b' | wordcount ~ 'a' | upper",
    "[{'k': 1, 'v': 'a'}, {'k': 1, 'v': 'b'}] | groupby('k') ~ undefined_name is defined ~ 'a' in 'abc' ~ 1 < 2 < 3",
    "('<b>' | safe) ~ ('<b>' | e) ~ (('<b>' | safe) + '<i>') ~ ('%s' | safe) % '<'",
]
LOOPS = [
    "{% for a in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.previtem }}{{ a }}{% endfor %}",
    "{% for a, b in {'x': 1, 'y': 2}.items() %}{{ a }}{{ b }}{% if loop.first %}{% continue %}{% endif %}.{% endfor %}",
    "{% for a in [] %}{% else %}none{% endfor %}{% for a in nothing %}{% else %}none{% endfor %}",
    "{% for a in [1, 2, 3, 4] if a % 2 %}{{ loop.revindex }}{{ a }}{% endfor %}",
    "{% for a in [1, [2, [3]]] recursive %}{% if a is iterable %}{{ loop(a) }}{% else %}{{ a }}{% endif %}{% endfor %}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ m(1) }}{% call m(3) %}x{% endcall %}",
    "{% set x %}a{{ 1 }}{% endset %}{{ x }}{% set a, b = 1, 2 %}{{ a }}{{ b }}{% filter upper %}abc{% endfilter %}",
    "{% set ns = namespace(t='') %}{% for c in 'abc' %}{% set ns.t = c ~ ns.t %}{% endfor %}{{ ns.t }}",
]


@pytest.mark.parametrize("source", [*(f"{{{{ {expression} }}}}" for expression in HARMLESS), *LOOPS])
def test_what_is_harmless_is_as_in_jinja(folder, source):
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    template = ChatTemplate({"default": source}, Tokenizer.read(folder))
    assert template.render([{"role": "user", "content": "hello"}]) == plain.from_string(source).render()


DEEP = {
    "brackets": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "lists": "{{ " + "[" * 5_000 + "]" * 5_000 + " }}",
    "sums": "{{ 1" + " + 1" * 40_000 + " }}",
    "nots": "{{ " + "not " * 40_000 + "1 }}",
    "blocks": "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "loops": "{% for i in [] %}" * 200 + "{% endfor %}" * 200,
    "filters": "{{ 1" + " | list" * 20_000 + " }}",
    "lookups": "{{ a" + ".a" * 60_000 + " }}",
    "calls": "{{ a" + "()" * 60_000 + " }}",
    "digits": "{{ " + "9" * 10_000 + " }}",
    "exponent": "{{ 1e" + "9" * 1000 + " }}",
    "length": "a" * (MAX_SOURCE_CHARS + 1),
    "filter": "{{ 1 | no_such_filter }}",
    "lines": "{%\n\n bad\n %}",
    "line ends": "{{ '\n' \x1b[2J",
}


@pytest.mark.parametrize("name", DEEP)
def test_a_template_that_cannot_be_compiled_is_one_line(folder, tmp_path, name):
    (tmp_path / "chat_template.jinja").write_text(DEEP[name])
    try:
        ChatTemplate.read(tmp_path, Tokenizer.read(folder))
    except ModelError as error:
        received = str(error)
        assert received.startswith(f"the chat template of {tmp_path} ")
        assert received.isprintable()
        assert len(received) < 600
    else:
        assert name == "exponent"
