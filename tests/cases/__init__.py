"""Runs case files: JSON files that each say what to do and what must come of it. `python -m tests.cases DIR [DIR or FILE ...]`.

One line per case: pass, fail or not run, its id, and why. A case passes if all its checks were made and held. What a check
means stands at the function of its name; a check, or a key of one, without a function makes the case not run. Kinds are in
`kinds.KINDS`.
"""
