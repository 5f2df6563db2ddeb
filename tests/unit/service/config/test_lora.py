import pytest

from service.config.lora import LoraModule, LoraModules, parse_lora_modules

JSONS = (
    '{"name": 3, "path": "x"}',
    '{"name": "a"}',
    '{"name": "a", "path": "b", "rank": 3}',
    '{"name": "a", "path": "b"} c=d',
    '{"name": "a", "path": "b", "is_3d_lora_weight": 1}',
)
SQL, TALK = LoraModule("sql", "/data/sql"), LoraModule("org/talk", "talk,2", "base")


def test_both_forms():
    assert parse_lora_modules("") == LoraModules()
    assert parse_lora_modules("sql=/data/sql").modules == (SQL,)
    talk = '{"name": "org/talk", "path": "talk,2", "base_model_name": "base", "is_3d_lora_weight": false}'
    assert parse_lora_modules(f"sql=/data/sql,{talk}").modules == (SQL, TALK)
    assert parse_lora_modules(f"{talk} , sql=/data/sql").modules == (TALK, SQL)


def test_written_as_it_is_read():
    both = LoraModules((SQL, TALK))
    assert parse_lora_modules(str(both)) == both
    assert str(LoraModules()) == ""


@pytest.mark.parametrize(
    "text",
    ["sql", "=path", "sql=", "a b=path", "sql=x,sql=y", "{", "{}", f"{'n' * 129}=path", *JSONS],
)
def test_what_is_not_allowed(text):
    with pytest.raises(ValueError, match=r"name=path|a different name"):
        parse_lora_modules(text)
