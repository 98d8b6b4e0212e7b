"""Erasure on request: who asked, what they are given, who stays out afterwards, and how an auditor checks that."""
