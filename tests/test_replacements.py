"""Attributes of modules and classes are replaced for a while, and are as before afterwards."""

import importlib
import sys
import types

import pytest

from echelon.replacements import Replacement, calling, replaced, replaced_in


class Base:
    def inherited(self):
        return "base"

    @staticmethod
    def static():
        return "static"


class Owner(Base):
    pass


def louder(original):
    return lambda *args: original(*args) + "!"


def test_an_attribute_is_replaced_and_restored():
    module = types.ModuleType("module")
    module.name = "before"
    with replaced([Replacement(module, "name", lambda value: value + " and after")]):
        assert module.name == "before and after"
    assert module.name == "before"


def test_what_was_inherited_is_inherited_again():
    with replaced([Replacement(Owner, "inherited", louder)]):
        assert Owner().inherited() == "base!"
    assert "inherited" not in vars(Owner)


def test_a_static_method_stays_one():
    with replaced([Replacement(Base, "static", lambda original: staticmethod(louder(original)))]):
        assert Base().static() == "static!"
    assert isinstance(vars(Base)["static"], staticmethod)


def test_one_attribute_may_be_replaced_twice():
    module = types.ModuleType("module")
    module.call = lambda: "once"
    original = module.call
    twice = [Replacement(module, "call", louder), Replacement(module, "call", calling(lambda call: call() + "?"))]
    with replaced(twice):
        assert module.call() == "once!?"
    assert module.call is original


def test_a_missing_attribute_is_refused_and_earlier_ones_are_restored():
    with (
        pytest.raises(AttributeError),
        replaced([Replacement(Base, "static", louder), Replacement(Base, "no", louder)]),
    ):
        pass
    assert Base.static() == "static"


def test_an_attribute_that_may_be_missing_goes_again():
    with replaced([Replacement(Owner, "new", lambda value: value, may_be_missing=True)]):
        assert Owner.new is None
    assert not hasattr(Owner, "new")


@pytest.mark.parametrize("is_early", [True, False])
def test_a_library_may_be_imported_before_or_later(tmp_path, monkeypatch, is_early):
    (tmp_path / "library_of_test.py").write_text("def call(): return 'before'")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "library_of_test", raising=False)
    finders = list(sys.meta_path)
    if is_early:
        importlib.import_module("library_of_test")
    with replaced_in("library_of_test", lambda module: [Replacement(module, "call", louder)]):
        module = importlib.import_module("library_of_test")
        assert module.call() == "before!"
    assert module.call() == "before"
    assert sys.meta_path == finders
