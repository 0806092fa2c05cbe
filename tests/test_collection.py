"""Collecting tests is quick: every worker collects all of them, and so does every run of a single test of a folder."""


def test_nothing_that_takes_seconds_is_imported_to_collect_tests(imported_by_collection: list[str]) -> None:
    assert imported_by_collection == [], "import it in the tests or fixtures that use it"
