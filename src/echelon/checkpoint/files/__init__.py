"""Folders of checkpoints: files whose every byte is checked, and the rename that completes one."""
