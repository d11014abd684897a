"use strict";

/* The data of the page, loaded in pieces. A page opened from disk cannot read files, but it can load
   scripts: each piece is one, and calls TF.take(name, value). */
const TF = {
  pieces: new Map(),
  waiting: new Map(),
  kept: 64, // pieces of details and images in memory

  take(name, value) {
    TF.pieces.set(name, value);
    const waiting = TF.waiting.get(name);
    if (waiting) waiting.resolve(value);
    TF.waiting.delete(name);
  },

  /* Returns a promise of a piece. */
  load(name) {
    if (TF.pieces.has(name)) {
      const value = TF.pieces.get(name);
      TF.pieces.delete(name); // the last one used goes to the end
      TF.pieces.set(name, value);
      return Promise.resolve(value);
    }
    if (TF.waiting.has(name)) return TF.waiting.get(name).promise;
    let resolve, reject;
    const promise = new Promise((yes, no) => { resolve = yes; reject = no; });
    TF.waiting.set(name, { promise, resolve, reject });
    const tag = document.createElement("script");
    tag.src = `data/${encodeURIComponent(name)}.js`;
    tag.onload = () => tag.remove();
    tag.onerror = () => {
      tag.remove();
      TF.waiting.delete(name);
      reject(new Error(`data/${name}.js cannot be loaded`));
    };
    document.head.append(tag);
    TF.forget();
    return promise;
  },

  forget() {
    const large = [...TF.pieces.keys()].filter((name) => /^(tokens|images)-/.test(name));
    for (const name of large.slice(0, Math.max(0, large.length - TF.kept))) TF.pieces.delete(name);
  },

  get site() { return TF.pieces.get("site"); },
  get live() { return TF.pieces.get("live"); },

  layer(name) { return TF.site.layers.find((layer) => layer.name === name); },

  /* Whether there is a token of this layer and number; both come from an address that anyone can type. */
  hasToken(layer, number) { return /^(0|[1-9]\d*)$/.test(number) && number < (TF.layer(layer)?.tokens ?? 0); },

  async token(layer, number) {
    const chunk = Math.floor(number / TF.site.chunk);
    const [rows, table] = await Promise.all([
      TF.load(`tokens-${layer}-${chunk}`), TF.load(`table-${layer}`),
    ]);
    return { ...rows[number - chunk * TF.site.chunk], ...TF.row(table, number) };
  },

  row(table, number) {
    const row = {};
    for (const name of Object.keys(table)) row[name] = table[name][number];
    return row;
  },

  async image(row) {
    const chunk = Math.floor(row / TF.site.chunk);
    return (await TF.load(`images-${chunk}`))[row - chunk * TF.site.chunk];
  },
};
