"""Parsers of what tools print: text in, small frozen values out; unknown lines are skipped."""
