"""Conversations: record formats, chat templates, reasoning control and tool calls."""
