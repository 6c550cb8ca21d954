// The devices where they stand, with the links of each mesh axis.

function meshSection() {
  const found = DATA.mesh;
  if (!found) return undefined;
  const { dimensions, coordinates, links } = found, n = coordinates.length;
  const labelled = n <= 64, cell = labelled ? 46 : n <= 256 ? 24 : 16, gap = labelled ? 26 : n <= 256 ? 14 : 8, pitch = cell + gap, margin = 30;
  const [height, width] = [1, 1, ...dimensions].slice(-2), planes = n / (height * width); // those of slices or pods one after the other
  const isHosts = found.wiring !== "torus", perRow = isHosts && dimensions.length === 1 ? Math.min(width, 8) : width;
  const apart = isHosts && height > 1 ? 26 : 0; // between hosts
  const rowsOf = Math.ceil(width / perRow), planeWidth = perRow * pitch + margin, fit = Math.max(1, Math.floor(1100 / planeWidth));
  const across = Math.ceil(planes / Math.ceil(planes / fit)); // planes in a row, as many in each
  const place = (device) => {
    const x = device % width, y = Math.floor(device / width) % height, z = Math.floor(device / (width * height));
    return [
      margin + (z % across) * planeWidth + (x % perRow) * pitch + cell / 2,
      margin + Math.floor(z / across) * (height * (rowsOf * pitch + apart) + margin) + (y * rowsOf + Math.floor(x / perRow)) * pitch + y * apart + cell / 2 + apart / 2,
    ];
  };
  const size = [margin + across * planeWidth - gap, 2 * margin + Math.ceil(planes / across) * (height * (rowsOf * pitch + apart) + margin) - margin - gap];
  const told = make("output", { "aria-live": "polite" });
  const svg = draw("svg", { width: size[0], height: size[1], viewBox: `0 0 ${size[0]} ${size[1]}`, role: "group", "aria-label": `The ${n} devices; arrow keys move between them` });

  for (let host = 0; isHosts && host < height * planes; host++) {
    const [x, y] = place(host * width);
    svg.append(draw("rect", { class: "host", x: x - cell / 2 - 9, y: y - cell / 2 - 9, width: perRow * pitch - gap + 18, height: rowsOf * pitch - gap + 18, rx: 10 }));
    if (height * planes > 1 && labelled) svg.append(draw("text", { class: "caption", x: x - cell / 2 - 5, y: y - cell / 2 - 13 }, `host ${host}`));
  }
  for (const [a, b, axis] of links) {
    const [ax, ay] = place(a), [bx, by] = place(b), far = Math.hypot(bx - ax, by - ay), reach = cell / 2 + gap * 0.42;
    const isNext = b > a, crosses = Math.floor(a / (width * height)) !== Math.floor(b / (width * height));
    const line = (d, opacity) => svg.append(draw("path", { d, style: `fill:none;stroke:${axisColour(AXES[axis])};stroke-width:${n > 256 ? 2 : 3};stroke-opacity:${opacity}` }));
    if (crosses) { // short strokes to the plane behind and the one before
      const [i, k] = isNext ? [1, -1] : [-1, 1];
      line(`M${ax} ${ay}l${i * reach} ${-i * reach}M${bx} ${by}l${k * reach} ${-k * reach}`, 0.95);
    } else if (!isNext) { // closes a ring: short strokes out of both ends
      const [ux, uy] = [(ax - bx) / far * (reach + 3), (ay - by) / far * (reach + 3)];
      line(`M${ax} ${ay}l${ux} ${uy}M${bx} ${by}l${-ux} ${-uy}`, 0.95);
    } else {
      const bend = far < 1.5 * pitch + apart ? 0 : Math.min(far * 0.14, pitch * 0.62) + 3 * axis; // around what stands between
      const [mx, my] = [(ax + bx) / 2 - (by - ay) / far * bend * 2, (ay + by) / 2 + (bx - ax) / far * bend * 2];
      line(`M${ax} ${ay}Q${mx} ${my} ${bx} ${by}`, bend ? 0.6 : 0.95);
    }
  }
  const devices = coordinates.map((at, device) => {
    const [x, y] = place(device);
    const group = draw("g", { class: "device", tabindex: device ? -1 : 0, role: "img", "aria-label": words(device), onclick: () => choose(device), onfocus: () => choose(device), onpointerenter: () => choose(device) },
      draw("rect", { x: x - cell / 2, y: y - cell / 2, width: cell, height: cell, rx: labelled ? 8 : 4 }));
    if (labelled) group.append(draw("text", { x, y: y - 7 }, `${device}`), draw("text", { x, y: y + 8 }, AXES.length > 1 ? at.join(",") : ""));
    svg.append(group);
    return group;
  });
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -perRow, ArrowDown: perRow }[event.key], now = devices.indexOf(document.activeElement);
    if (by === undefined || now < 0 || !devices[now + by]) return;
    event.preventDefault();
    devices[now].setAttribute("tabindex", -1);
    devices[now + by].setAttribute("tabindex", 0);
    devices[now + by].focus();
  });

  function words(device) {
    const where = isHosts ? (height * planes > 1 ? `host ${Math.floor(device / width)}, device ${device % width} of it` : "") : `at (${dimensions.map((size, k) => Math.floor(device / dimensions.slice(k + 1).reduce((a, b) => a * b, 1)) % size).join(", ")})`;
    return `Device ${device}${where ? `, ${where}` : ""}: ${AXES.map((axis, k) => `${axis} = ${coordinates[device][k]}`).join(", ") || "alone"}`;
  }
  // Those that share all but one coordinate with it exchange data with it along that axis.
  function choose(device) {
    told.textContent = `${words(device)}.`;
    devices.forEach((group, other) => {
      const differs = AXES.map((_, k) => k).filter((k) => coordinates[other][k] !== coordinates[device][k]);
      group.classList.toggle("is-chosen", other === device);
      group.firstChild.style.fill = differs.length === 1 ? `color-mix(in srgb, ${axisColour(AXES[differs[0]])} 38%, var(--card))` : "";
    });
  }

  const shape = dimensions.join(" × ");
  const wired = found.rings.some(Boolean) ? "torus" : "grid";
  const what = found.wiring === "torus" ? (DATA.cluster.includes("*") ? `${shape}, slices first` : `a ${shape} ${wired}`) : planes * height > 1 ? `${planes * height} hosts of ${width}` : "one host";
  section("mesh", "Mesh",
    make("p", {}, `${count(n)} devices on ${DATA.cluster}, ${what}. Lines are the links that the collectives of an axis run over; ` +
      "point at a device to see with which others it exchanges data along each axis." +
      (links.some(([a, b]) => b < a) ? " Strokes that leave the grid close a ring." : "") + (planes > 1 ? " Slanted strokes lead to the plane behind and the one before." : "")),
    legend(DATA.axes.map(([name, size]) => [axisColour(name), `${name}, ${size} devices`])),
    make("div", { class: "drawing" }, svg), told);
  choose(0);
}
