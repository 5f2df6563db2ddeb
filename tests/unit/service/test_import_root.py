"""The folder that an installation is imported from."""

import os

from service.import_root import IMPORT_ROOT, python_path
from tests.support.source_tree import ROOT


def test_children_import_from_the_same_place_first():
    assert IMPORT_ROOT == ROOT
    assert python_path({}) == str(ROOT)
    assert python_path({"PYTHONPATH": "/a"}) == f"{ROOT}{os.pathsep}/a"
