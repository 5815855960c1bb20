"""Parsers of answers in formats of their own, beside those of parsers.py.

thinking.py   an answer that thinks before it answers
harmony.py    gpt-oss' messages on channels
xml_calls.py  calls of GLM-4.5, Qwen3-Coder and MiniMax-M2
deepseek.py   calls of DeepSeek V3 and V3.1
values.py     the JSON that the text of a parameter stands for
"""
