"""Parsers of answers in formats of their own, beside those of parsers.py.

thinking.py   an answer that thinks before it answers
harmony.py    gpt-oss' messages on channels
"""
