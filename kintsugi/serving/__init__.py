"""The OpenAI-compatible gateway (`kintsugi serve`): HTTP on one side, generation servers of its own on the other."""
