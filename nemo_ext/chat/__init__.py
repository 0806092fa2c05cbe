"""Conversations: formats, chat templates, control of reasoning and tool calls."""
