/** What is wrong with a page that a person must be able to read: test_screens.py runs it in the page. */
({
  /** Texts that are hard to read, by the rule of the Web Content Accessibility Guidelines, level AA: contrast of 4.5. */
  faint() {
    const parse = (text) => (text.match(/[\d.]+/g) ?? []).map(Number);
    const light = (rgb) => {
      const [r, g, b] = rgb.map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const colourOf = (node) => parse(getComputedStyle(node).backgroundColor);
    const behind = (node) => {
      const over = [];
      for (let at = node; at; at = at.parentElement) {
        const [r, g, b, a = 1] = colourOf(at);
        if (a > 0) over.push([r, g, b, a]);
        if (a === 1) break;
      }
      const isOpaque = over.length && over.at(-1)[3] === 1;
      let shown = isOpaque ? over.pop() : colourOf(document.documentElement);
      for (const [r, g, b, a] of over.reverse()) shown = [r, g, b].map((c, i) => a * c + (1 - a) * shown[i]);
      return shown.slice(0, 3);
    };
    const UNREAD = ":disabled, [aria-disabled=true], [aria-hidden=true], .off, svg, .visually-hidden, .skip, noscript, option";
    const wrong = new Set();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const text = walker.currentNode.nodeValue.trim();
      const node = walker.currentNode.parentElement;
      if (!text || node.closest(UNREAD)) continue;
      if (!node.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
      const lights = [light(parse(getComputedStyle(node).color).slice(0, 3)), light(behind(node))];
      const ratio = (Math.max(...lights) + 0.05) / (Math.min(...lights) + 0.05);
      if (ratio < 4.5) wrong.add(`${text.slice(0, 30)} (${ratio.toFixed(2)}, ${node.className})`);
    }
    return [...wrong].slice(0, 8);
  },

  /** Controls below 24 pixels, by the same rules. */
  small() {
    return [...document.querySelectorAll("main button, header button, main input, main select, nav a")]
      .filter((node) => node.checkVisibility() && !["radio", "checkbox"].includes(node.type))
      .map((node) => [node, node.getBoundingClientRect()])
      .filter(([, box]) => box.height < 24 || box.width < 24)
      .map(([node, box]) => `${node.textContent || node.dataset.testid} ${box.width.toFixed()}x${box.height.toFixed()}`)
      .slice(0, 8);
  },
})
