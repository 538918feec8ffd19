// Keeps the page current: every text and bar has a key, the server sends those that changed. Text goes into
// textContent only. When cards come or go the page is loaded anew.
"use strict";
(() => {
  const live = document.getElementById("live");
  const shape = document.body.dataset.shape;
  const elements = new Map();
  for (const element of document.querySelectorAll("[data-k]")) elements.set(element.dataset.k, element);

  let reloading = false;
  function reload() {
    if (reloading) return;
    reloading = true;
    // a cluster in motion must not make the page flicker, and a page of thousands of nodes is not loaded every second
    setTimeout(() => location.reload(), Math.max(1000, elements.size));
  }

  function show(element, text, state, value) {
    if (value !== null) {
      element.hidden = value < 0;
      if (value >= 0) element.value = value;
      return;
    }
    if (element.textContent !== text) element.textContent = text;
    if (state) element.dataset.state = state;
  }

  function say(words, state) {
    live.textContent = words;
    live.dataset.state = state;
  }

  const source = new EventSource("/page/live");
  source.onopen = () => say("live", "ready");
  source.onerror = () => say("connection lost, what is shown may be old", "lost");
  source.onmessage = (event) => {
    const told = JSON.parse(event.data);
    if (told.shape !== shape) reload();
    for (const [key, text, state, value] of told.cells) {
      const element = elements.get(key);
      if (element) show(element, text, state, value);
    }
  };
})();
