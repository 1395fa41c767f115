"""The trace file (`traces/FORMAT.md`): what it may contain, how it is read, written and checked, which ones ship."""
