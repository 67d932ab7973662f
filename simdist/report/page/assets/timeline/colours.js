// Colours as the style sheet has them, and hatching. A page may define them in any notation, so the browser reads them.

const HATCH_PITCH = 8; // CSS pixels
const MEAN_INK = 0.5; // of the ink that hatching has, where it is too fine to draw: a face keeps its hue
const HATCHES = {
  "/": (x, y, n) => (x + y) % n < 1,
  "\\": (x, y, n) => (x - y + n) % n < 1,
  "x": (x, y, n) => (x + y) % n < 1 || (x - y + n) % n < 1,
  "+": (x, y, n) => x % n < 1 || y % n < 1,
  ".": (x, y, n) => x % (n / 2) < 1 && y % (n / 2) < 1,
  "|": (x, y, n) => x % (n / 2) < 1,
};

/** Read the colours of a timeline: of text and lines, and of each style by its swatch in the legend. */
function readColours(root, styles) {
  const reader = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const ofTheme = getComputedStyle(root);
  const probe = root.appendChild(document.createElement("span"));
  const named = (name) => {
    probe.style.color = `var(--timeline-${name})`;
    return channelsOf(reader, getComputedStyle(probe).color);
  };
  const [background, surface, text, muted, line, accent, step] = [
    "bg", "surface", "fg", "muted", "line", "accent", "step",
  ].map(named);
  probe.remove();
  const ofStyles = styles.map(({ key, hatch }) => {
    const swatch = getComputedStyle(root.querySelector(`.timeline-swatch[data-style="${key}"]`));
    return inked(channelsOf(reader, swatch.backgroundColor), channelsOf(reader, swatch.color), hatch);
  });
  return { background, surface, text, muted, line, accent, step, ofStyles, font: ofTheme.fontFamily };
}

/** Return red, green and blue of a CSS colour. */
function channelsOf(reader, colour) {
  reader.fillStyle = colour;
  reader.fillRect(0, 0, 1, 1);
  return [...reader.getImageData(0, 0, 1, 1).data.subarray(0, 3)];
}

const cssOf = ([red, green, blue]) => `rgb(${red} ${green} ${blue})`;

/** Return a pixel of image data, as its four bytes lie in memory on a little-endian machine. */
const pixelOf = ([red, green, blue]) => (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;

const mixed = (one, other, share) => one.map((channel, i) => Math.round(channel * (1 - share) + other[i] * share));

/** Return a style's face and ink, a mean of both for where hatching is too fine, and the colour of text upon it. */
function inked(face, ink, hatch) {
  let covered = 0;
  for (let x = 0; hatch && x < HATCH_PITCH; x++) {
    for (let y = 0; y < HATCH_PITCH; y++) covered += HATCHES[hatch](x, y, HATCH_PITCH);
  }
  const mean = mixed(face, ink, MEAN_INK * (covered / HATCH_PITCH ** 2));
  return { face, ink, hatch, mean, text: luminance(face) > 0.18 ? [0, 0, 0] : [255, 255, 255] };
}

/** Return the relative luminance of WCAG 2.2; above 0.18 black text has the higher contrast. */
function luminance(colour) {
  const [red, green, blue] = colour.map((channel) => {
    const share = channel / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

/** Return a square of hatched pixels to repeat; its side is a whole number of pitches. */
function tileOf({ face, ink, hatch }, ratio) {
  const side = Math.round(HATCH_PITCH * ratio);
  const tile = new Uint32Array(side * side).fill(pixelOf(face));
  for (let y = 0; hatch && y < side; y++) {
    for (let x = 0; x < side; x++) {
      const [left, top] = [x, y].map((at) => Math.floor((at * HATCH_PITCH) / side));
      if (HATCHES[hatch](left, top, HATCH_PITCH)) tile[y * side + x] = pixelOf(ink);
    }
  }
  return { side, tile };
}

/** Draw the swatches of the legend as spans are drawn. */
function paintSwatches(root, styles, colours, ratio) {
  for (const [number, { key }] of styles.entries()) {
    const swatch = root.querySelector(`.timeline-swatch[data-style="${key}"]`);
    [swatch.width, swatch.height] = [28, 14].map((length) => Math.round(length * ratio));
    const { side, tile } = tileOf(colours.ofStyles[number], ratio);
    const image = new ImageData(swatch.width, swatch.height);
    const pixels = new Uint32Array(image.data.buffer);
    pixels.forEach((_, i) => {
      pixels[i] = tile[(Math.floor(i / swatch.width) % side) * side + ((i % swatch.width) % side)];
    });
    swatch.getContext("2d").putImageData(image, 0, 0);
  }
}
