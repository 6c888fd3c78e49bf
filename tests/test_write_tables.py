"""The tables in README and docs are what docs/data says."""

from __future__ import annotations

import subprocess
import sys

from tests.training import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "write_tables.py"


def test_every_table_is_what_the_data_says() -> None:
    checked = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_number_that_was_typed_by_hand_is_found() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import write_tables as w\n"
        "page = w.PAGES[1].read_text()\n"
        "assert page == w.rewritten(page) and '<!-- table: ' in page\n"
        "assert w.rewritten(page.replace('1.00x', '9.00x')) == page\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
