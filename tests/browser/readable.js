/** What is wrong with a page that a person must be able to read: test_screens.py runs it in the page. */
({
  /** All of it that is found, by name. */
  wrong() {
    return { faint: this.faint(), cut: this.cut(), overlapping: this.overlapping(), small: innerWidth < 600 ? this.small() : [] };
  },

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

  /** Texts and controls that are cut off: by the window, or by a box that neither scrolls nor tells the whole as a tooltip. */
  cut() {
    const wrong = new Set();
    for (const { node, text, box } of this.texts()) {
      for (let at = node; at && at !== document.body; at = at.parentElement) {
        const { overflowX, textOverflow, webkitLineClamp } = getComputedStyle(at);
        if (/auto|scroll/.test(overflowX)) break; // one can go there
        if (at.closest("[title]") && (textOverflow === "ellipsis" || webkitLineClamp !== "none")) break;
        const by = at.getBoundingClientRect();
        if (overflowX !== "visible" && (box.left < by.left - 1 || box.right > by.right + 1 || box.bottom > by.bottom + 4)) wrong.add(`${text} (by ${at.className})`);
        if (at.parentElement === document.body && (box.left < 0 || box.right > innerWidth)) wrong.add(`${text} (by the window)`);
      }
    }
    return [...wrong].slice(0, 8);
  },

  /** Texts that are drawn over each other. */
  overlapping() {
    const wrong = new Set();
    const all = this.texts().sort((a, b) => a.box.top - b.box.top);
    all.forEach((one, index) => {
      for (const other of all.slice(index + 1)) {
        if (other.box.top >= one.box.bottom - 3) break;
        const across = Math.min(one.box.right, other.box.right) - Math.max(one.box.left, other.box.left);
        const isOver = across > 2 && other.node !== one.node && !one.node.contains(other.node) && !other.node.contains(one.node);
        if (isOver) wrong.add(`${one.text} / ${other.text}`);
      }
    });
    return [...wrong].slice(0, 8);
  },

  /** Every line of text that is seen where it stands: `{ node, text, box }`. */
  texts() {
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const text = walker.currentNode.nodeValue.trim().slice(0, 30);
      const node = walker.currentNode.parentElement;
      if (!text || node.closest("svg, .visually-hidden, .skip, noscript, option, dialog, [hidden]")) continue;
      if (getComputedStyle(node).clipPath !== "none" || !node.checkVisibility({ visibilityProperty: true })) continue;
      const range = document.createRange();
      range.selectNodeContents(walker.currentNode);
      for (const box of range.getClientRects()) if (this.isSeen(node, box)) found.push({ node, text, box });
    }
    return found;
  },

  /** Is a line within all boxes that scroll, or show so many lines? One beyond their edge is there for who scrolls. */
  isSeen(node, box) {
    for (let at = node; at && at !== document.body; at = at.parentElement) {
      const style = getComputedStyle(at);
      if (style.position === "sticky") return false; // it may stand over what scrolls under it
      const by = at.getBoundingClientRect();
      if ((/auto|scroll/.test(style.overflowY) || style.webkitLineClamp !== "none") && (box.bottom > by.bottom + 1 || box.top < by.top - 1)) return false;
      if ((/auto|scroll/.test(style.overflowX) || style.textOverflow === "ellipsis") && (box.right > by.right + 1 || box.left < by.left - 1)) return false;
    }
    return box.width > 0;
  },

  /** Controls that are too small to be tapped: below 24 pixels, by the same rules. */
  small() {
    return [...document.querySelectorAll("main button, header button, main input, main select, nav a")]
      .filter((node) => node.checkVisibility() && !["radio", "checkbox"].includes(node.type))
      .map((node) => [node, node.getBoundingClientRect()])
      .filter(([, box]) => box.height < 24 || box.width < 24)
      .map(([node, box]) => `${node.textContent || node.dataset.testid} ${box.width.toFixed()}x${box.height.toFixed()}`)
      .slice(0, 8);
  },
})
