"""Models served behind OpenAI-compatible endpoints, by our engine for any machine or by vLLM, with replicas
(docs/serving.md).
"""
