// What drawing in a page takes: elements, patterns, a sharp canvas, readable colours. Read before replay.js, as one script.

function element(tag, parent, properties = {}, text = "") {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(text);
  parent.append(made);
  return made;
}

// A pattern tells apart without colour; drawn once for each pair of colours.
const patterns = new Map();
function pattern(context, kind, ink, paper) {
  const name = kind + ink + paper;
  if (!patterns.has(name)) {
    const tile = new OffscreenCanvas(8, 8), pen = tile.getContext("2d");
    pen.fillStyle = paper;
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = pen.fillStyle = ink;
    pen.lineWidth = 1.5;
    pen.beginPath();
    if (kind !== "dots") for (const x of [-8, 0, 8]) { pen.moveTo(x, 8); pen.lineTo(x + 8, 0); }
    if (kind === "cross") for (const x of [-8, 0, 8]) { pen.moveTo(x, 0); pen.lineTo(x + 8, 8); }
    pen.stroke();
    if (kind === "dots") for (const [x, y] of [[1, 1], [5, 5]]) pen.fillRect(x, y, 2, 2);
    patterns.set(name, context.createPattern(tile, "repeat"));
  }
  return patterns.get(name);
}

const isDark = (colour) => { const [r, g, b] = colour.match(/[\d.]+/g).map(Number); return r * 0.3 + g * 0.59 + b * 0.11 < 128; };
const onColour = (colour) => (colour === "#0072B2" ? "white" : "black"); // contrast of 5 to 1 or more

// A canvas as wide as its parent, sharp on every screen; returns its pen.
function resize(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  return pen;
}
